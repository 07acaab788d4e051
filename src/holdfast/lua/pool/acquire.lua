-- Take a permit of a pool, or take a place in its queue and learn when the first lease ends.
--
-- KEYS 1 the holders   2 the last fence   3 the queue   4 its waiters
--      5 the tombstone of this token   6 the name itself: a key if a mutex holds it
-- ARGV 1 token   2 ttl in ms   3 retention of the fence in ms
--      4 the kind: 'semaphore' or 'rwlock'
--      5 number of waiters in the local queue of this process, and notification channel ('-': queue without one); '': do
--        not queue
--      6 mode: 'n5' one of five permits, 'any' a reader, 'all' a writer
--
-- Returns {1, fence, slot}                 granted for the full ttl (or longer), to a new holder or one that asked twice;
--                                          slot is the number of the permit, else -1
--         {0, ms, now_us, first, holder}   refused; ms until the first lease ends; the server's time; first is 1 if no
--                                          other waiter is before us; holder is the token whose lease ends first,
--                                          '' if there is none
--         {-1, 0}                          refused; this token was abandoned before this request arrived
--         {-2, kind}                       refused; the name is in use as another kind of lock
--         error FENCELIMIT, FENCETYPE      refused; see fence.lua
--
-- One step, because a free permit is free only until another client takes it; because a slot and its fence belong together;
-- and because a waiter must be in the queue before a holder leaves and looks for the next one. If the reply is lost, the
-- step is sent again, and finds its own hold or its own place in the queue.

-- include fence.lua
-- include queue.lua
-- include pool.lua

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
local kind = redis.call('HGET', KEYS[4], 'kind')
if not kind and redis.call('EXISTS', KEYS[1], KEYS[3], KEYS[6]) == 0 then -- a free name: admit writes its kind
  local fence = mint(ARGV[1], last, '1', ARGV[3])
  return {1, fence, client_slot(admit(ARGV[1], ARGV[6], ttl_ms, fence))}
end
-- If the queue or the waiters were deleted by hand, the other key or the holders show that the name is a pool.
local marked = redis.call('ZSCORE', KEYS[3], '')
if kind ~= ARGV[4] or not marked then
  kind = kind or kind_of_slot(lowest_slot(holder_count()))
  local earlier = not kind and string.match(redis.call('HGET', KEYS[4], '') or '', '^%a+$')
  if earlier then -- an earlier version wrote the kind into the field ''
    kind = earlier .. ' of an earlier version of Holdfast'
  elseif not kind and redis.call('EXISTS', KEYS[6], KEYS[3]) > (marked and 1 or 0) then
    kind = 'lock'
  end
  if kind and kind ~= ARGV[4] then
    return {-2, kind}
  end
  mark_kind(ARGV[4])
end

remove_ended()
local ends, slot = hold_of(ARGV[1])
if ends then
  prolong(ARGV[1], ends, slot, ttl_ms)
  remove_waiter(ARGV[1])
  return {1, renew_fence(ARGV[1], ARGV[3]), client_slot(slot)}
end
local turn, first = admit_waiters(ARGV[1], ARGV[6])
if turn then
  local fence = mint(ARGV[1], last, '1', ARGV[3])
  remove_waiter(ARGV[1])
  return {1, fence, client_slot(admit(ARGV[1], ARGV[6], ttl_ms, fence))}
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
local rank = 2 * holder_count() -- of the first end: the fences and the slots come before it
local holder = redis.call('ZRANGE', KEYS[1], rank, rank, 'WITHSCORES')
local left_ms = holder[2] and math.ceil((holder[2] - now) / 1000) or 0
return {0, left_ms, now, first and 1 or 0, holder[1] or ''}
