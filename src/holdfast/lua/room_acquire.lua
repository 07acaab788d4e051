-- Take a place in a room, or one in its queue, and say when the first of those inside may be gone.
--
-- KEYS 1 those inside   2 the last fence   3 the queue   4 its waiters   5 the places
--      6 the tombstone of this token   7 the name itself, which is a key if it is locked by a mutex
-- ARGV 1 token   2 ttl in ms   3 how long a fence is remembered after it was given out, in ms
--      4 what kind of room it is   5 its notification channel ('-': queue without one, '': do not queue)
--      6 how much it wants: 'n5' one of five places, 'any' one of very many, 'all' of them
--
-- Returns {1, fence, place}         granted; the ttl is full (or longer), whether it is new or was inside already
--         {0, ms, now_us, first, holder}   refused; ms until the first lease inside ends; the time here;
--                                   first is 1 if nobody else is before us in the queue; holder is the token of the
--                                   holder whose lease ends first, '' if nobody is inside
--         {-1, 0}                   refused; this token was given up before this request arrived
--         {-2, kind}                refused; the name is in use as another kind of lock
--         error FENCELIMIT, FENCETYPE   refused; see fence.lua
--
-- One step, because whether there is room is only true while nobody else comes in, because the place and its fence must
-- not come apart, and because a place in the queue must be taken before somebody leaves and looks for the next.
-- A resent acquire finds its own token inside, or its own place in the queue, so a lost reply costs nothing.

-- include fence.lua
-- include queue.lua
-- include room.lua

read_time()
local refused
last, refused = last_fence()
if refused then
  return refused
end
if redis.call('EXISTS', KEYS[6]) == 1 then
  return {-1, 0}
end
local kind = redis.call('HGET', KEYS[4], '')
if kind ~= ARGV[4] then
  if not kind or not string.find(kind, '^%a+$') then
    kind = redis.call('EXISTS', KEYS[7], KEYS[3]) > 0 and 'lock'
  end
  if kind then
    return {-2, kind}
  end
  -- In front of the queue, so that whoever wants it as a mutex meets a queue, and looks here.
  redis.call('ZADD', KEYS[3], 0, '')
  redis.call('HSET', KEYS[4], '', ARGV[4])
  keep(3, 4, 5000)
end

purge()
local first
local ends = redis.call('ZSCORE', KEYS[1], ARGV[1])
local place = ends and redis.call('ZSCORE', KEYS[5], ARGV[1])
if ends then
  -- This may be the first of two requests, arriving late, after its holder has asked for more: never make it shorter.
  if tonumber(ends) < now + ARGV[2] * 1000 then
    redis.call('ZADD', KEYS[1], string.format('%.0f', now + ARGV[2] * 1000), ARGV[1])
    keep_all(tonumber(ARGV[2]))
  end
else
  local turn
  turn, first = let_in(ARGV[1], ARGV[6])
  place = turn and seat(ARGV[1], ARGV[6], ARGV[2])
end
if place then
  strike_off(ARGV[1])
  return {1, mint(last, '1', ARGV[3]), tonumber(place)}
end

if ARGV[5] ~= '' then
  if not redis.call('ZSCORE', KEYS[3], ARGV[1]) then
    local tail = redis.call('ZRANGE', KEYS[3], -1, -1, 'WITHSCORES')[2]
    local arrival = tail and tonumber(tail) >= now and tail + 1 or now
    redis.call('ZADD', KEYS[3], string.format('%.0f', arrival), ARGV[1])
  end
  local entry = now_us .. ' ' .. ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. ARGV[6] .. ' ' .. ARGV[5]
  redis.call('HSET', KEYS[4], ARGV[1], entry)
  keep(3, 4, 5000)
end
local holder = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
local left_ms = holder[2] and math.ceil((holder[2] - now) / 1000) or 0
return {0, left_ms, now, first and 1 or 0, holder[1] or ''}
