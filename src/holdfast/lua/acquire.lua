-- Take the lock, or take a place in its queue and say for how long it is still held.
--
-- KEYS 1 the lock: exactly the user's name, a plain string holding the owner's token
--      2 the last fence given out for this name
--      3 the queue   4 its waiters
--      5 the tombstone of this token
-- ARGV 1 token   2 ttl in ms   3 how long a fence is remembered after it was given out, in ms
--      4 how many fences to set aside for this holder and those it may pass the lock on to
--      5 the channel of its bell ('-': queue without one, '': do not queue)   6 its grace in ms
--
-- Returns the fence                 granted; the ttl is full (or longer), whether the key was free or already ours
--         {0, ms, now_us, first}    refused; ms until the holder's lease ends, -1 if it never does; the time here;
--                                   first is 1 if nobody else is before us in the queue
--         {-1, 0}                   refused; this token was given up before this request arrived
--         {-2, kind}                refused; the name is in use as another kind of lock, which keeps the queue for that
--
-- One step, because the grant and its fence must not come apart, because "free" or "already mine" is only true
-- while nobody else writes, and because a place in the queue must be taken before the holder can look for the next.
-- A resent acquire finds its own token, or its own place, so a lost reply costs nothing.

-- include fence.lua

read_time()
-- All that could fail comes before the first write, because what a script has written stays written.
local last = redis.call('GET', KEYS[2])
local contended = redis.call('EXISTS', KEYS[5], KEYS[3]) > 0
if not contended and redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  return mint(last, ARGV[4], ARGV[3])
end

-- include queue.lua
-- include grant.lua

local free_in_ms
if contended then
  if redis.call('EXISTS', KEYS[5]) == 1 then
    return {-1, 0}
  end
  local free_until, _, kind = last_free()
  if kind then
    return {-2, kind}
  end
  if redis.call('EXISTS', KEYS[1]) == 0 then
    local first, entry = head()
    if free_until > now and free_until - now <= OPEN_US then
      free_in_ms = math.ceil((free_until - now) / 1000) -- first comes the moment of those who only poll
    elseif first and first ~= ARGV[1] then
      grant(first, entry)
      last = redis.call('GET', KEYS[2])
    end
  end
end

if not free_in_ms then
  local granted = redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2])
  if not granted and redis.call('GET', KEYS[1]) == ARGV[1] then
    granted = true
    -- This may be the first of two requests, arriving late, after its holder has asked for more: never make it shorter.
    if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
      redis.call('PEXPIRE', KEYS[1], ARGV[2])
    end
  end
  if granted then
    strike_off(ARGV[1])
    return mint(last, ARGV[4], ARGV[3])
  end
end

local first = 0
if ARGV[5] ~= '' then
  if not redis.call('ZSCORE', KEYS[3], ARGV[1]) then
    local tail = redis.call('ZRANGE', KEYS[3], -1, -1, 'WITHSCORES')[2]
    local arrival = tail and tonumber(tail) >= now and tail + 1 or now
    redis.call('ZADD', KEYS[3], string.format('%.0f', arrival), ARGV[1])
  end
  local entry = now_us .. ' ' .. ARGV[6] .. ' ' .. ARGV[3] .. ' ' .. ARGV[4] .. ' ' .. ARGV[5]
  redis.call('HSET', KEYS[4], ARGV[1], entry)
  redis.call('PEXPIRE', KEYS[3], 5000)
  redis.call('PEXPIRE', KEYS[4], 5000)
  first = head() == ARGV[1] and 1 or 0
end
-- Read last, whatever else was read or written: a client that has the lock watched is told of the next write to it.
local left_ms = redis.call('PTTL', KEYS[1])
return {0, free_in_ms or left_ms, now, first}
