-- Take the lock, or take a place in its queue and say for how long it is still held.
--
-- KEYS 1 the lock: exactly the user's name, a plain string holding the owner's token
--      2 the last fence given out for this name
--      3 the queue   4 its waiters
--      5 the tombstone of this token
-- ARGV 1 token   2 ttl in ms   3 how long a fence is remembered after it was given out, in ms
--      4 how many fences to set aside for this holder and those it may pass the lock on to
--      5 its notification channel ('-': queue without one, '': do not queue)
--      6 the tokens that its caller holds, each behind ';'
--
-- Returns the fence                 granted; the ttl is full (or longer), whether the key was free or already ours
--         {0, ms, now_us, place, holder}   refused; ms until the holder's lease ends, -1 if it never does; the time here;
--                                   place is 1 if no other waiter is before us in the queue, 2 if the lock is kept for
--                                   the first in the queue, else 0; holder is the token of the holder, or of the waiter
--                                   that it is kept for, '' in a yield window
--         {-1, 0}                   refused; this token was given up before this request arrived
--         {-2, kind}                refused; the name is in use as another kind of lock, which keeps the queue for that
--         error FENCELIMIT, FENCETYPE   refused; see fence.lua
--
-- One step, because the grant and its fence must not come apart, because "free" or "already mine" is only true
-- while nobody else writes, and because a place in the queue must be taken before the holder can look for the next.
-- A resent acquire finds its own token, or its own place, so a lost reply costs nothing.

-- include fence.lua

read_time()
-- All that could fail comes before the first write, because what a script has written stays written.
local found = redis.call('EXISTS', KEYS[5], KEYS[3])
if found == 0 then
  local last, refused = last_fence()
  if refused then
    return refused
  elseif redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
    return mint(last, ARGV[4], ARGV[3])
  end
  local owner = ARGV[5] == '' and redis.call('GET', KEYS[1])
  if owner and owner ~= ARGV[1] then -- neither does it queue nor is there a queue (benchmarks.before: try a held lock)
    return {0, redis.call('PTTL', KEYS[1]), now, 0, owner}
  end
end

-- include queue.lua
-- include grant.lua

local owner = redis.call('GET', KEYS[1])
local front, free_in_ms, passes
if found > 0 then
  front = redis.call('ZRANGE', KEYS[3], 0, 0)[1]
  if found > (front and 1 or 0) then -- more than a queue, so there is the tombstone
    return {-1, 0}
  end
  passes = ARGV[6] ~= '' and owner and owner ~= ARGV[1] and is_kept_for_unready(owner)
  if passes or (owner and front and owner ~= ARGV[1] and gives_way(owner, front, ARGV[1])) then
    redis.call('DEL', KEYS[1])
    owner, front = false, nil
  end
  if front == '' or not owner then -- another kind of lock has '' in front of its queue
    local free_until, kind = last_free()
    if kind or front == '' then
      return {-2, kind or 'permit pool or latch'} -- without a kind: its waiters were deleted by hand
    end
    if not owner then
      local first, entry = head(front)
      front = first
      if free_until > now and free_until - now <= OPEN_US then
        if ARGV[5] ~= '' then -- first comes the moment of those who only poll; and who does not queue is one of them
          free_in_ms = math.ceil((free_until - now) / 1000)
        end
      elseif first and first ~= ARGV[1] and not passes then
        grant(first, entry)
        owner = redis.call('GET', KEYS[1])
        front = nil
      end
    end
  end
end

if not free_in_ms and (not owner or owner == ARGV[1]) then
  local last, refused = last_fence()
  if refused then
    return refused
  elseif not owner then
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  elseif redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
    -- Never make it shorter: this may be the first of two requests, arriving late, after its holder has asked for more.
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
  strike_off(ARGV[1])
  return mint(last, ARGV[4], ARGV[3])
end

if ARGV[5] ~= '' then
  redis.call('ZADD', KEYS[3], 'NX', arrival(), ARGV[1]) -- who stands there already keeps its place
  local entry = now_us .. ' ' .. ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. ARGV[4] .. ARGV[6] .. ' ' .. ARGV[5]
  redis.call('HSET', KEYS[4], ARGV[1], entry)
  note_foreign(owner)
  keep_queue()
  front = head(front)
end
local place = place_of(front, owner, ARGV[1])
if place == 2 and ARGV[6] ~= '' then
  wake(owner)
end
-- Read last, whatever else was read or written: a client that has the lock watched is told of the next write to it.
local left_ms = redis.call('PTTL', KEYS[1])
return {0, free_in_ms or left_ms, now, place, owner or ''}
