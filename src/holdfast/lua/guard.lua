-- Write, unless a later holder has written before us.
--
-- KEYS 1 what is written   2 the record of who wrote it last   3 where a lock of that name would keep its last fence
-- ARGV 1 fence   2 holder   3 for how long the record is kept, in ms (empty: for ever)   4 the command, if there is one
--      5... its arguments after the key
--
-- Returns {1, the command's reply}, {1} if there was none; {0, the fence on record} refused; {-1} the key is a lock;
-- {-2} the record is not one.
--
-- One step, because a check that comes before the write does not help a writer who is stopped in between. The record is
-- written first: if it cannot be (a full server), nothing is, and if the command fails, only the fence has risen.

if redis.call('EXISTS', KEYS[3]) == 1 then
  return {-1}
end
local record = redis.call('GET', KEYS[2])
if record then
  local fence, holder = string.match(record, '^(%d+) (.+)$')
  -- Numbers, because '9' is the greater text than '10'. A double is exact for every fence there is.
  local ours, theirs = tonumber(ARGV[1]), tonumber(fence)
  if not theirs or theirs < 1 or theirs > 9007199254740991 then
    return {-2} -- another program wrote it, so the last fence is not known
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
