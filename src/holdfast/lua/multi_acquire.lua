-- Take several locks, all or none; if one is refused, wait in its queue, and after some time in the queues of all.
--
-- KEYS five for each name, see several.lua
-- ARGV 1 token   2 ttl in ms   3 how long a fence is remembered after it was given out, in ms
--      4 1 if KEYS has all names of the lock; 0 if others are in another slot
--      5 its notification channel ('-': queue without one, '': do not queue)
--      6 the time here of its first refusal, in us (0: none yet)
--      7 the tokens that its caller holds, each behind ';'
--
-- Returns the fence                 granted, all of them, with this one fence; the ttl is full (or longer)
--         {0, ms, now_us, place, holder, lock}   refused by that lock; ms until its key expires, negative if it does not
--                                   or there is none, in a yield window until that ends; the time here; place is 1 if no
--                                   other waiter is before us in its queue, 2 if it is kept for the first waiter, else
--                                   0; holder is the token of the holder, or of that waiter, '' if there is none
--         {-1, 0}                   refused; this token was given up before this request arrived
--         {-2, kind, lock}          refused; that lock is in use as another kind
--         error FENCELIMIT, FENCETYPE   refused; see fence.lua
--
-- One step, because a client that takes one lock after the other can meet a client that does it the other way round.
--
-- For PATIENCE_US a waiter stands in the queue of the name that refused it. What is kept for it there, but is not enough, is
-- given back in this step. If that was in vain, it stands in the queues of all its names, with one time of arrival, later
-- than that of every other waiter there. From then on each name that comes free at its turn stays kept for it. Two
-- waiters cannot each keep what the other needs: a name that is kept gives way to an earlier arrival, and a waiter that
-- was struck off in one queue arrives anew in all.
--
-- A waiter behind it may hold what it waits for (nested locks), or another waiter may that waits for that one. Locks that
-- are nested in sorted order form no cycle with this one: see grant.lua. A kept name is also given to a waiter that says it
-- holds what refuses us. Against other cycles, it is given to the next waiter that holds a lock when this one has stood in
-- all queues for NESTED_US, then after two, three, four times NESTED_US more, and so on; and likewise to the next waiter of
-- any kind, by KEEPING_US. The times grow, so that long holds of all names do not starve it. It keeps its place, and is
-- first again when that name is released.

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

-- include queue.lua
-- include grant.lua

local PATIENCE_US = 100000
local KEEPING_US, NESTED_US = 2000000, 200000
local MAX_BEHIND = 50 -- waiters that are looked at to find one that should go first
local token, since = ARGV[1], tonumber(ARGV[6])

local function take_all()
  local fence
  for name = 1, NAMES do
    look_at(name)
    if redis.call('GET', KEYS[1]) ~= token then
      redis.call('SET', KEYS[1], token, 'PX', ARGV[2])
    elseif redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
      redis.call('PEXPIRE', KEYS[1], ARGV[2])
    end
    strike_off(token)
    fence = mint(last, '1', ARGV[3])
  end
  return fence
end

-- Read its places and kept names: the client may not know them, if a reply was lost.
local places, owned = 0, 0
local waits_at, arrived, uneven
for name = 1, NAMES do
  look_at(name)
  local score = redis.call('ZSCORE', KEYS[3], token)
  if score then
    uneven = uneven or (arrived and arrived ~= score)
    places, waits_at, arrived = places + 1, name, score
  end
  if redis.call('GET', KEYS[1]) == token then
    owned = owned + 1
  end
end
if owned == NAMES then
  return take_all()
end

local stands_in_all = ARGV[4] == '1' and places == NAMES and not uneven
local in_all = stands_in_all
  or (ARGV[4] == '1' and ARGV[5] ~= '' and since > 0 and math.abs(now - since) >= PATIENCE_US)
local window_ms = {} -- by name: how long it is still free for clients that poll
local mine = arrived and tonumber(arrived) or since -- its place in the order of arrival; 0: behind all others
local other_kind, other_at
local refusing = {} -- the tokens of the holders that refuse it

-- Leave the queue of the name looked at. If it was kept for us, or is free, it goes to the next waiter.
local function leave()
  local owner = redis.call('GET', KEYS[1])
  if owner == token then
    redis.call('DEL', KEYS[1])
  end
  if redis.call('ZREM', KEYS[3], token) == 1 or owner == token then
    redis.call('HDEL', KEYS[4], token)
    if not owner or owner == token then
      grant_next()
    end
  end
end

if in_all and not stands_in_all then
  mine = 0
  for name = 1, NAMES do
    look_at(name)
    leave()
    mine = math.max(mine, tonumber(arrival()))
  end
elseif not in_all and since > 0 then
  mine = math.min(mine, since)
end

local function is_before(score, other)
  return mine > 0 and (mine < score or (mine == score and token < other))
end

-- Whether no waiter for the name looked at comes before us. If one does, it gets the lock, which is free or kept for another
-- waiter. ``ready``: no name before this one was refused.
local function is_our_turn(ready, owner)
  local waiter, entry = find_waiter(function(waiter, entry)
    return waiter == token or is_reachable(waiter, entry)
  end)
  local is_ours = not waiter or waiter == token
  if ready and not is_ours and is_unready(entry) or not ready and is_ours then -- see grant.lua
    waiter, entry = find_waiter(function(waiter, entry)
      return waiter == token and ready or waiter ~= token and blocks_others(entry) and is_reachable(waiter, entry)
    end)
  end
  if not waiter or waiter == token then
    return true
  end
  local _, _, fences = wanted(entry)
  if fences == '0' and is_before(tonumber(redis.call('ZSCORE', KEYS[3], waiter)), waiter) then
    return true
  end
  if waiter ~= owner then
    grant(waiter, entry)
  end
  return false
end

local function may_have(name, ready)
  local owner = redis.call('GET', KEYS[1])
  local front = redis.call('ZRANGE', KEYS[3], 0, 0)[1]
  if owner == token and ready or not front then
    return not owner or owner == token
  elseif owner == token then
    return is_our_turn(ready)
  end
  local free_until, kind = last_free()
  if front == '' then -- without a kind: its waiters were deleted by hand
    kind = kind or 'permit pool or latch'
  end
  if kind then
    other_kind, other_at = kind, KEYS[1]
    return false
  end
  if owner then -- if it is kept for a waiter, that one may have ended, be unready, or have come later
    local score = redis.call('ZSCORE', KEYS[3], owner)
    refusing[owner] = not score
    local is_weaker = ready and score and (is_before(tonumber(score), owner) or is_kept_for_unready(owner))
    return score and (is_weaker or gives_way(owner, owner)) and is_our_turn(ready, owner)
  end
  if free_until > now and free_until - now <= OPEN_US then
    window_ms[name] = math.ceil((free_until - now) / 1000)
    return false
  end
  return is_our_turn(ready)
end

-- Where it waits in one queue, that name is looked at first: as long as that is refused, it keeps its place there. Where it
-- waits in all, the first name that is refused is the one that it waits for.
local refused_at
local may = {}
local function try(name)
  if (in_all or not refused_at) and may[name] == nil then
    look_at(name)
    may[name] = may_have(name, not refused_at) and true or false
    if not may[name] then
      refused_at = refused_at or name
    end
  end
end
if waits_at and not in_all then
  try(waits_at)
end
for name = 1, NAMES do
  try(name)
end
if not refused_at then
  return take_all()
end

-- Whether one of these times has passed since its last step.
local function has_stood_for(first_us)
  local every_us, after_us, has_passed = first_us, first_us, false
  look_at(waits_at)
  local before = tonumber(string.match(redis.call('HGET', KEYS[4], token) or '', '^%d+')) or now
  while after_us <= now - arrived do
    has_passed = before - arrived < after_us
    every_us = every_us + first_us
    after_us = after_us + every_us
  end
  return has_passed
end
local lends = stands_in_all and has_stood_for(KEEPING_US)
local lends_to_nested = stands_in_all and has_stood_for(NESTED_US)

-- Give the name looked at, which is free or kept for us, to a waiter behind us that should go first; whether there is one.
local function lend()
  for _, waiter in ipairs(redis.call('ZRANGE', KEYS[3], 0, MAX_BEHIND)) do
    local entry = waiter ~= token and redis.call('HGET', KEYS[4], waiter)
    if entry and is_present(entry) and is_reachable(waiter, entry) then
      local goes_first = lends
      for held in string.gmatch(string.match(entry, '^%d+ %d+ %d+ (%S*)') or '', ';([^;]+)') do
        goes_first = goes_first or lends_to_nested or refusing[held]
      end
      if goes_first then
        grant(waiter, entry)
        return true
      end
    end
  end
  return false
end

-- No fence for one name alone: '0', or '00' behind the name that it waits for.
local ready_entry = now_us .. ' ' .. ARGV[2] .. ' ' .. ARGV[3] .. ' 0' .. ARGV[7] .. ' ' .. ARGV[5]
local unready_entry = now_us .. ' ' .. ARGV[2] .. ' ' .. ARGV[3] .. ' 00' .. ARGV[7] .. ' ' .. ARGV[5]
for name = 1, NAMES do
  look_at(name)
  if other_kind or ARGV[5] == '' or not (in_all or name == refused_at) then
    leave()
  else
    redis.call('ZADD', KEYS[3], 'NX', mine > 0 and string.format('%.0f', mine) or arrival(), token)
    redis.call('HSET', KEYS[4], token, name <= refused_at and ready_entry or unready_entry)
    note_foreign(redis.call('GET', KEYS[1]))
    keep_queue()
    if may[name] and not lend() then
      redis.call('SET', KEYS[1], token, 'PX', KEPT_MS)
    end
  end
end
if other_kind then
  return {-2, other_kind, other_at}
end

look_at(refused_at)
local owner = redis.call('GET', KEYS[1])
local first = head()
local place = place_of(first, owner, token)
if place == 2 and ARGV[7] ~= '' then
  wake(owner)
end
-- Read last, whatever else was read or written: a client that has the lock watched is told of the next write to it.
local left_ms = redis.call('PTTL', KEYS[1])
return {0, window_ms[refused_at] or left_ms, now, place, owner or '', KEYS[1]}
