-- Become a holder of a permit pool, or take a place in its queue, and say when the first lease in it ends.
--
-- KEYS 1 the holders   2 the last fence   3 the queue   4 its waiters
--      5 the tombstone of this token   6 the name itself, which is a key if it is locked by a mutex
-- ARGV 1 token   2 ttl in ms   3 how long a fence is remembered after it was given out, in ms
--      4 what kind of pool it is   5 its notification channel ('-': queue without one, '': do not queue)
--      6 how much it wants: 'n5' one of five permits, 'any' a reader's part, 'all' a writer's
--
-- Returns {1, fence, slot}          granted; the ttl is full (or longer), whether it is new or was a holder already; slot is
--                                   the number of the permit, else -1
--         {0, ms, now_us, first, holder}   refused; ms until the first lease ends; the time here;
--                                   first is 1 if nobody else is before us in the queue; holder is the token of the
--                                   holder whose lease ends first, '' if there is none
--         {-1, 0}                   refused; this token was given up before this request arrived
--         {-2, kind}                refused; the name is in use as another kind of lock
--         error FENCELIMIT, FENCETYPE   refused; see fence.lua
--
-- One step, because whether there is room is only true while nobody else comes in, because the slot and its fence must
-- not come apart, and because a place in the queue must be taken before somebody leaves and looks for the next.
-- A resent acquire finds its own hold, or its own place in the queue, so a lost reply costs nothing.

-- include fence.lua
-- include queue.lua
-- include room.lua

read_time()
local refused
last, refused = last_fence()
if refused then
  return refused
end
if redis.call('EXISTS', KEYS[5]) == 1 then
  return {-1, 0}
end
local ttl_ms = tonumber(ARGV[2])
local kind = redis.call('HGET', KEYS[4], '')
if not kind and redis.call('EXISTS', KEYS[1], KEYS[3], KEYS[6]) == 0 then -- the first holder of a free name marks it
  return {1, mint(last, '1', ARGV[3]), told(admit(ARGV[1], ARGV[6], ttl_ms))}
end
-- If one of the marks was deleted by hand, the other one or the holders say that the name is a pool.
local marked = redis.call('ZSCORE', KEYS[3], '')
if kind ~= ARGV[4] or not marked then
  kind = string.match(kind or '', '^%a+$') or kind_of_holders()
  if not kind and redis.call('EXISTS', KEYS[6], KEYS[3]) > (marked and 1 or 0) then
    kind = 'lock'
  end
  if kind and kind ~= ARGV[4] then
    return {-2, kind}
  end
  mark(ARGV[4])
end

purge()
local first
local ends, slot = hold_of(ARGV[1])
if ends then
  prolong(ARGV[1], ends, slot, ttl_ms)
else
  local turn
  turn, first = let_in(ARGV[1], ARGV[6])
  slot = turn and admit(ARGV[1], ARGV[6], ttl_ms)
end
if slot then
  strike_off(ARGV[1])
  return {1, mint(last, '1', ARGV[3]), told(slot)}
end

if ARGV[5] ~= '' then
  if not redis.call('ZSCORE', KEYS[3], ARGV[1]) then
    local tail = redis.call('ZRANGE', KEYS[3], -1, -1, 'WITHSCORES')[2]
    local arrival = tail and tonumber(tail) >= now and tail + 1 or now
    redis.call('ZADD', KEYS[3], string.format('%.0f', arrival), ARGV[1])
  end
  local entry = now_us .. ' ' .. ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. ARGV[6] .. ' ' .. ARGV[5]
  redis.call('HSET', KEYS[4], ARGV[1], entry)
  keep_queue(5000)
end
local rank = count() -- of the first end, behind the slots
local holder = redis.call('ZRANGE', KEYS[1], rank, rank, 'WITHSCORES')
local left_ms = holder[2] and math.ceil((holder[2] - now) / 1000) or 0
return {0, left_ms, now, first and 1 or 0, holder[1] or ''}
