-- Store the computed value or the failure, give up the claim, and notify the waiters.
--
-- KEYS 1 the entry   2 the claim   3 the waiters   4 the failure
--      5 the tombstone of this token
-- ARGV 1 token   2 the outcome: 'value', 'failure', or 'nothing' (the computation was cancelled)
--      3 the value, or why there is none
--      4 how long the value is fresh or the failure remembered, in ms   5 how long the key lasts, in ms
--      6 the time to compute the value, in us
--      7 how long the tombstone lasts, in ms (0: none, because every request was answered)
--
-- Returns 1 stored; -1 not stored, because memory is full; 0 not stored, because the claim was no longer ours (it ended,
--         or the key was invalidated).
--
-- One step, because a claim that ends between the check and the write would let an old value replace a newer one; and
-- because a caller that finds no claim must find the value.

-- include cache.lua

if ARGV[7] ~= '0' then
  redis.pcall('SET', KEYS[5], '', 'PX', ARGV[7])
end
if redis.call('GET', KEYS[2]) ~= ARGV[1] then
  return 0
end
read_time()
local kept = 0
if ARGV[2] == 'value' then
  local fresh = string.format('%.0f', now + ARGV[4] * 1000)
  -- A full server may refuse this; the claim is given up nevertheless.
  kept = redis.pcall('HSET', KEYS[1], 'value', ARGV[3], 'fresh', fresh, 'cost', ARGV[6])
  if type(kept) == 'table' and string.find(kept.err, 'WRONGTYPE', 1, true) then -- another program wrote this key
    redis.call('DEL', KEYS[1])
    kept = redis.pcall('HSET', KEYS[1], 'value', ARGV[3], 'fresh', fresh, 'cost', ARGV[6])
  end
  if type(kept) == 'number' then
    redis.call('PEXPIRE', KEYS[1], ARGV[5])
    redis.call('DEL', KEYS[4])
  end
elseif ARGV[2] == 'failure' then
  local till = string.format('%.0f', now + ARGV[4] * 1000)
  local record = now_us .. ' ' .. till .. ' ' .. ARGV[3]
  kept = redis.pcall('SET', KEYS[4], record, 'PX', ARGV[5])
end
redis.call('DEL', KEYS[2])
notify_all()
return (type(kept) == 'table' and kept.err) and -1 or 1
