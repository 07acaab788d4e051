-- Look a value up, and where it is missing or due, claim the right to compute it; or wait for whoever has that right.
--
-- KEYS 1 the entry   2 the claim   3 the waiters   4 the failure
--      5 the tombstone of this token
-- ARGV 1 token   2 ttl of a claim in ms
--      3 how early to refresh: by so many times what the value cost to compute (0: not before it is due)
--      4 the channel on which to be told of a value ('-' or '': none)
--      5 since when it has been waiting, by the time here in us (0: it has not)
--
-- Returns {1, value}              here it is; maybe old, while somebody else refreshes it
--         {2, now_us, value}      compute it; value is the old one, which may be served meanwhile, or nil
--         {0, ms, now_us}         somebody computes it; ms until the claim ends if its holder falls silent
--         {3, why}                the computation has failed while it was waiting, or not long ago
--         {-1}                    this token was given up before this request arrived
--
-- One step, because between a miss and a claim the value may have been stored, and would be computed twice; and because
-- whoever is told to wait must be known to the one who stores before that can happen.

-- include cache_bells.lua

read_time()
local entry = redis.call('HMGET', KEYS[1], 'value', 'fresh', 'cost')
local value = entry[1]
if value and entry[2] - now > ARGV[3] * entry[3] then
  return {1, value}
end

local failure = redis.call('GET', KEYS[4])
if failure then
  local at, till, why = string.match(failure, '^(%d+) (%d+) (.*)$')
  local waited = tonumber(ARGV[5]) > 0 and tonumber(at) >= tonumber(ARGV[5])
  if waited or tonumber(till) > now then
    return value and {1, value} or {3, why}
  end
end

if redis.call('EXISTS', KEYS[5]) == 1 then
  return value and {1, value} or {-1}
end
local owner = redis.call('GET', KEYS[2])
if not owner then
  redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
  return {2, now, value}
end
if owner == ARGV[1] then
  -- Sent twice, or the reply was lost. Never make it shorter.
  if redis.call('PTTL', KEYS[2]) < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[2], ARGV[2])
  end
  return {2, now, value}
end
if value then
  return {1, value}
end
if ARGV[4] ~= '' and ARGV[4] ~= '-' then
  redis.call('HSET', KEYS[3], ARGV[4], ARGV[1])
  redis.call('PEXPIRE', KEYS[3], 5000)
end
return {0, redis.call('PTTL', KEYS[2]), now}
