-- Take the lock, or take a place in its queue and learn how long it is still held.
--
-- KEYS 1 the lock: exactly the user's name, a plain string with the owner's token
--      2 the last fence given out for this name
--      3 the queue   4 its waiters
--      5 the tombstone of this token
-- ARGV 1 token   2 ttl in ms   3 retention of the fence in ms
--      4 number of fences to reserve: this holder may pass the lock on within its process
--      5 number of waiters in the local queue of this process, and notification channel ('-': queue without one); '': do
--        not queue
--      6 the tokens that the caller holds, each after ';'
--
-- Returns the fence                        granted for the full ttl (or longer); the key was free or already ours
--         {0, ms, now_us, place, holder}   refused; ms until the holder's lease ends, -1 if never; the server's time;
--                                          place is 1 if no other waiter is before us, 2 if the lock is kept for the first
--                                          waiter, else 0; holder is the token of the holder, or of the waiter that the
--                                          lock is kept for, '' in a yield window
--         {-1, 0}                          refused; this token was abandoned before this request arrived
--         {-2, kind}                       refused; the name is in use as another kind of lock
--         error FENCELIMIT, FENCETYPE      refused; see fence.lua
--
-- One step, because a grant and its fence belong together; because "free" and "already ours" are true only until another
-- client writes; and because a waiter must be in the queue before the holder looks for the next one. If the reply is lost,
-- the step is sent again, and finds its own token or its own place in the queue.

-- include fence.lua

read_time()
-- Everything that can fail comes before the first write: Redis does not roll a script back.
local found = redis.call('EXISTS', KEYS[5], KEYS[3])
if found == 0 then
  local last, refused = last_fence()
  if refused then
    return refused
  elseif redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
    return mint(ARGV[1], last, ARGV[4], ARGV[3])
  end
  local owner = ARGV[5] == '' and redis.call('GET', KEYS[1])
  if owner and owner ~= ARGV[1] then -- no queue, and the client will not queue (benchmarks.before: try a held lock)
    return {0, redis.call('PTTL', KEYS[1]), now, 0, owner}
  end
end

-- include queue.lua
-- include grant.lua

local owner = redis.call('GET', KEYS[1])
local front, free_in_ms, passes
if found > 0 then
  front = redis.call('ZRANGE', KEYS[3], 0, 0)[1]
  if found > (front and 1 or 0) then -- not only the queue exists, but also the tombstone
    return {-1, 0}
  end
  passes = ARGV[6] ~= '' and owner and owner ~= ARGV[1] and is_kept_for_unready(owner)
  if passes or (owner and front and owner ~= ARGV[1] and gives_way(owner, front, ARGV[1])) then
    redis.call('DEL', KEYS[1])
    owner, front = false, nil
  end
  if front == '' or not owner then
    local kind = kind_of_name(front)
    if kind then
      return {-2, kind}
    end
    if not owner then
      local first, entry = first_waiter(front)
      front = first
      local free_until = read_yield()
      if free_until > now and free_until - now <= LONGEST_YIELD_US then
        if ARGV[5] ~= '' then -- the window is for polling clients, and a client that does not queue is a polling client
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
    -- Never shorten the lease: this may be a late duplicate that arrives after an extension.
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
  remove_waiter(ARGV[1])
  return mint(ARGV[1], last, ARGV[4], ARGV[3])
end

if ARGV[5] ~= '' then
  redis.call('ZADD', KEYS[3], 'NX', arrival(), ARGV[1]) -- NX: a waiter keeps its place
  local entry = now_us .. ' ' .. ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. ARGV[4] .. ARGV[6] .. ' ' .. ARGV[5]
  redis.call('HSET', KEYS[4], ARGV[1], entry)
  note_foreign(owner)
  keep_queue()
  front = first_waiter(front)
end
local place = place_of(front, owner, ARGV[1])
if place == 2 and ARGV[6] ~= '' then
  wake(owner)
end
-- Read the lock last: client tracking then reports the next write to it.
local left_ms = redis.call('PTTL', KEYS[1])
return {0, free_in_ms or left_ms, now, place, owner or ''}
