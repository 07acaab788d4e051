-- Write, unless a later holder has written before.
--
-- KEYS 1 what is written   2 the record of the last writer   3 the last fence, if there is a lock of that name
-- ARGV 1 fence   2 holder   3 how long the record lasts, in ms (empty: forever)   4 the command, if there is one
--      5... its arguments after the key
--
-- Returns {1, the command's reply}, or {1} without a command; {0, the fence on record} refused; {-1} the key is a lock;
--         {-2} the record is not in our format.
--
-- One step, because a writer that is stopped between the check and the write must not write later. The record is written
-- first: if a full server refuses it, nothing is written; if the command fails, only the fence has risen.

if redis.call('EXISTS', KEYS[3]) == 1 then
  return {-1}
end
local record = redis.call('GET', KEYS[2])
if record then
  local fence, holder = string.match(record, '^(%d+) (.+)$')
  -- Compared as numbers: as text, '9' is greater than '10'. A double is exact for every fence.
  local ours, theirs = tonumber(ARGV[1]), tonumber(fence)
  if not theirs or theirs < 1 or theirs > 9007199254740991 then
    return {-2} -- another program wrote it: the last fence is not known
  end
  if theirs > ours or (theirs == ours and holder ~= ARGV[2]) then
    return {0, fence}
  end
end
local written = ARGV[1] .. ' ' .. ARGV[2]
if ARGV[3] == '' then
  redis.call('SET', KEYS[2], written)
else
  redis.call('SET', KEYS[2], written, 'PX', ARGV[3])
end
if not ARGV[4] then
  return {1}
end
return {1, redis.call(ARGV[4], KEYS[1], unpack(ARGV, 5))}
