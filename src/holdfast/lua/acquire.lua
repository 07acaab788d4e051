-- Take the lock, or say for how long it is still held.
--
-- KEYS 1 the lock: exactly the user's name, a plain string holding the owner's token
--      2 the last fence given out for this name
--      3 the tombstone of this token
-- ARGV 1 token   2 ttl in ms   3 how long a fence is remembered after it was given out, in ms
--
-- Returns {1, fence}   granted; the ttl is full, whether the key was free or already ours
--         {0, pttl}    refused; ms until the holder's lease ends, -1 if it never does
--         {-1, 0}      refused; this token was given up before this request arrived
--
-- One step, because the grant and its fence must not come apart, and because "free" or "already mine" is only true
-- while nobody else writes. A resent acquire finds its own token and succeeds, so a lost reply costs nothing.

local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then
  return {0, redis.call('PTTL', KEYS[1])}
end
if redis.call('EXISTS', KEYS[3]) == 1 then
  return {-1, 0}
end

-- The clock keeps fences rising where a restart or failover has lost the counter; the counter keeps them rising
-- where the clock stands still or steps back. Microseconds stay exact in a double until the year 2255.
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local fence = now_us
local last = redis.call('GET', KEYS[2])
if last and tonumber(last) >= fence then
  fence = tonumber(last) + 1
end

-- The fence is written first: should it be refused (out of memory), no key is left that nobody believes in.
local keep_ms = ARGV[3] + math.ceil((fence - now_us) / 1000)
redis.call('SET', KEYS[2], string.format('%.0f', fence), 'PX', string.format('%.0f', keep_ms))
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {1, fence}
