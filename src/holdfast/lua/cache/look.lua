-- Read a value. If it is missing or due, claim the right to compute it, or wait for the caller that has this right.
--
-- KEYS 1 the entry   2 the claim   3 the waiters   4 the failure
--      5 the tombstone of this token
-- ARGV 1 token   2 ttl of a claim in ms
--      3 how early to refresh, as a multiple of the time to compute the value (0: not before it is due)
--      4 notification channel ('-' or '': none)
--      5 the server's time when this call began to wait, in us (0: it has not waited)
--      6 how long the tombstone lasts, in ms, if an earlier request with this token was not answered (0: all were)
--      7 the SHA-1 of a value that the caller cannot load, which counts as missing ('': none)
--
-- Returns {1, value}              the value; it may be stale while another caller refreshes it
--         {2, now_us, value}      compute it; the stale value may be served meanwhile, or nil
--         {0, ms, now_us}         another caller computes it; ms until its claim ends unless it is renewed
--         {3, why, us}            the computation failed that many us ago, while this call waited; -1 if an earlier
--                                 failure is still remembered
--         {-1}                    this token had its claim before, or was abandoned
--
-- One step, because a value that is stored between the miss and the claim would be computed twice; because a waiter must be
-- registered before the value is stored; and because a late request with this token must find the claim or the tombstone.
-- On a full server, values that exist are still served.

-- include cache.lua

read_time()
local entry = redis.pcall('HMGET', KEYS[1], 'value', 'fresh', 'cost')
if entry.err and not string.find(entry.err, 'WRONGTYPE', 1, true) then -- a key of another type counts as missing
  return entry
end
local value, fresh, cost = entry[1], tonumber(entry[2]), tonumber(entry[3])
if not (fresh and cost) or (value and ARGV[7] ~= '' and redis.sha1hex(value) == ARGV[7]) then
  value = false
end
if value and fresh - now > ARGV[3] * cost then
  return {1, value}
end

local failure = redis.call('GET', KEYS[4])
if failure then
  local at, till, why = string.match(failure, '^(%d+) (%d+) (.*)$')
  local waited = at and tonumber(ARGV[5]) > 0 and tonumber(at) > tonumber(ARGV[5])
  local remembered = at and tonumber(till) > now
  if waited or remembered then
    return value and {1, value} or {3, why, remembered and -1 or now - at}
  end
end

local owner = redis.call('GET', KEYS[2])
if not owner and redis.call('EXISTS', KEYS[5]) == 1 then
  return value and {1, value} or {-1}
end
if not owner or owner == ARGV[1] then
  local written = ARGV[6] ~= '0' and redis.pcall('SET', KEYS[5], '', 'PX', ARGV[6])
  if not owner and not (written and written.err) then
    written = redis.pcall('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
  elseif owner and redis.call('PTTL', KEYS[2]) < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[2], ARGV[2]) -- the step was sent twice; never shorten the claim
  end
  if written and written.err then
    return value and {1, value} or written
  end
  return {2, now, value}
end
if value then
  return {1, value}
end
if ARGV[4] ~= '' and ARGV[4] ~= '-' then
  -- The key of the claim, not the token: this call may end while another call of its process goes on waiting.
  redis.pcall('HSET', KEYS[3], ARGV[4], KEYS[2]) -- a full server refuses this: then the caller looks again by itself
  redis.call('PEXPIRE', KEYS[3], 5000)
end
return {0, redis.call('PTTL', KEYS[2]), now}
