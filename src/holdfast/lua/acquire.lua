-- Take the lock, or say for how long it is still held.
--
-- KEYS 1 the lock: exactly the user's name, a plain string holding the owner's token
--      2 the last fence given out for this name
--      3 the tombstone of this token
-- ARGV 1 token   2 ttl in ms   3 how long a fence is remembered after it was given out, in ms
--
-- Returns the fence    granted; the ttl is full (or longer), whether the key was free or already ours
--         {0, pttl}    refused; ms until the holder's lease ends, -1 if it never does
--         {-1, 0}      refused; this token was given up before this request arrived
--
-- One step, because the grant and its fence must not come apart, and because "free" or "already mine" is only true
-- while nobody else writes. A resent acquire finds its own token and succeeds, so a lost reply costs nothing.

if redis.call('EXISTS', KEYS[3]) == 1 then
  return {-1, 0}
end

-- All that could fail comes before the first write, because what a script has written stays written.
-- The clock keeps fences rising where a restart or failover has lost the counter; the counter keeps them rising
-- where the clock stands still or steps back. Both are 16 digits until the year 2286, so they compare as text, and
-- only the rare second case needs arithmetic (a double is exact up to the year 2255).
local time = redis.call('TIME')
local now_us = time[1] .. string.sub('00000' .. time[2], -6)
local fence, keep_ms = now_us, ARGV[3]
local last = redis.call('GET', KEYS[2])
if last and last >= now_us then
  fence = string.format('%.0f', last + 1)
  keep_ms = string.format('%.0f', keep_ms + math.ceil((fence - now_us) / 1000))
end

if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return {0, redis.call('PTTL', KEYS[1])}
  end
  -- This may be the first of two requests, arriving late, after its holder has asked for more: never make it shorter.
  if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
end
redis.call('SET', KEYS[2], fence, 'PX', keep_ms)
return fence
