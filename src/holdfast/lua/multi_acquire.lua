-- Take several locks, all or none; if one is refused, a place in its queue, and say for how long it is still held.
--
-- KEYS five for each name, see several.lua
-- ARGV 1 token   2 ttl in ms   3 how long a fence is remembered after it was given out, in ms
--      4 0, the fences that a waiter for several names wants of one
--      5 its notification channel ('-': queue without one, '': do not queue)
--      6 since when it waits, by the time here in us (0: it has not)
--
-- Returns the fence                 granted, all of them, with this one fence; the ttl is full (or longer)
--         {0, ms, now_us, first, holder, lock}   refused by that lock; ms until the lease of its holder ends, negative if
--                                   that is not known; the time here; first is 1 if nobody else is before us in its queue;
--                                   holder is the token of the holder, '' if there is none
--         {-1, 0}                   refused; this token was given up before this request arrived
--         {-2, kind}                refused; one of the names is in use as another kind of lock
--         error FENCELIMIT, FENCETYPE   refused; see fence.lua
--
-- One step, because whoever takes one lock after the other can meet somebody who does it the other way round. Nothing is
-- kept while it waits: what was granted to it in the meantime, but is not enough, is given back here, so nobody waits for
-- a lock that nobody holds. Among those who want several the one who has waited longest comes first, whichever
-- name it waits at: so they cannot go round in circles, each giving up for another.

-- include several.lua

read_time()
-- All that could fail comes before the first write, because what a script has written stays written.
local last, refused = last_fence_of_all()
if refused then
  return refused
end
if redis.call('EXISTS', each(1, 3, 5)) == 0 then
  local fence
  for name = 1, NAMES do
    look_at(name)
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
    fence = mint(last, '1', ARGV[3])
  end
  return fence
end
if redis.call('EXISTS', each(5)) > 0 then
  return {-1, 0}
end

-- include passing.lua

local token, mine = ARGV[1], tonumber(ARGV[6])
local free_in_ms, other_kind

-- Whether nobody who waits for the name looked at, which is free, comes before us. If somebody does, they are told.
local function is_our_turn()
  local waiter, entry = find_waiter(function(waiter, entry)
    return waiter == token or is_reachable(waiter, entry)
  end)
  if not waiter or waiter == token then
    return true
  end
  local _, _, fences, channel = wanted(entry)
  if fences ~= '0' then
    grant(waiter, entry)
    return false
  end
  local since = tonumber(redis.call('ZSCORE', KEYS[3], waiter))
  if mine == 0 or since < mine or (since == mine and waiter < token) then
    notify_ask(channel, waiter, 0)
    return false
  end
  return true
end

local function may_have()
  local owner = redis.call('GET', KEYS[1])
  local front = redis.call('ZRANGE', KEYS[3], 0, 0)[1]
  if owner == token or not front then
    return not owner or owner == token
  end
  local free_until, kind = last_free()
  if front == '' then -- without a kind: its waiters were deleted by hand
    kind = kind or 'permit pool or latch'
  end
  if kind then
    other_kind = kind
  end
  if kind or owner then
    return false
  end
  if free_until > now and free_until - now <= OPEN_US then
    free_in_ms = math.ceil((free_until - now) / 1000) -- first comes the moment of those who only poll
    return false
  end
  return is_our_turn()
end

-- Where it stands in a queue already: also if it does not know, because the reply was lost that would have told it.
local waits_at
for name = 1, NAMES do
  look_at(name)
  local since = redis.call('ZSCORE', KEYS[3], token)
  if since then
    waits_at = name
    mine = mine > 0 and math.min(mine, tonumber(since)) or tonumber(since)
  end
end

-- The name at which it waits is looked at first: as long as that is refused, it keeps its place there.
local refused_at
if waits_at then
  look_at(waits_at)
  refused_at = not may_have() and waits_at
end
for name = 1, refused_at and 0 or NAMES do
  look_at(name)
  if name ~= waits_at and not may_have() then
    refused_at = name
    break
  end
end

if not refused_at then
  local fence
  for name = 1, NAMES do
    look_at(name)
    if not redis.call('SET', KEYS[1], token, 'NX', 'PX', ARGV[2]) and redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
      redis.call('PEXPIRE', KEYS[1], ARGV[2])
    end
    fence = mint(last, '1', ARGV[3])
  end
  if waits_at then
    look_at(waits_at)
    strike_off(token)
  end
  return fence
end

for name = 1, NAMES do
  look_at(name)
  local granted = redis.call('GET', KEYS[1]) == token
  if granted then
    redis.call('DEL', KEYS[1])
  end
  if name == waits_at and name ~= refused_at then
    strike_off(token)
    granted = redis.call('EXISTS', KEYS[1]) == 0
  end
  if granted then
    pass_on(false)
  end
end
if other_kind then
  return {-2, other_kind}
end

look_at(refused_at)
local first = 0
if ARGV[5] ~= '' then
  if waits_at ~= refused_at then
    redis.call('ZADD', KEYS[3], mine > 0 and string.format('%.0f', mine) or arrival(), token)
  end
  local entry = now_us .. ' ' .. ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. ARGV[4] .. ' ' .. ARGV[5]
  redis.call('HSET', KEYS[4], token, entry)
  note_foreign(redis.call('GET', KEYS[1]))
  keep_queue()
  first = head() == token and 1 or 0
end
-- Read last, whatever else was read or written: a client that has the lock watched is told of the next write to it.
local left_ms = redis.call('PTTL', KEYS[1])
return {0, free_in_ms or left_ms, now, first, redis.call('GET', KEYS[1]) or '', KEYS[1]}
