-- Take several locks, all or none. If one is refused, wait in its queue; after some time, wait in the queues of all.
--
-- KEYS five for each name, see include/multi.lua
-- ARGV 1 token   2 ttl in ms   3 retention of the fence in ms
--      4 1 if KEYS has all names of the lock, 0 if other names are in another slot
--      5 number of waiters in the local queue of this process, and notification channel ('-': queue without one); '': do
--        not queue
--      6 the server's time of the first refusal, in us (0: none yet)
--      7 the tokens that the caller holds, each after ';'
--
-- Returns the fence                   granted, all of them, with this one fence, for the full ttl (or longer)
--         {0, ms, now_us, place, holder, lock}   refused by that lock; ms until its key expires, negative if it does not or
--                                     there is none, in a yield window until that ends; the server's time; place is 1 if no
--                                     other waiter is before us in its queue, 2 if it is kept for the first waiter, else 0;
--                                     holder is the token of the holder, or of that waiter, '' if there is none
--         {-1, 0}                     refused; this token was abandoned before this request arrived
--         {-2, kind, lock}            refused; that lock is in use as another kind
--         error FENCELIMIT, FENCETYPE   refused; see fence.lua
--
-- One step, because two clients that take the same locks one after the other, in different order, can deadlock.
--
-- For PATIENCE_US a waiter is in one queue: that of the name that refused it. If that name is kept for the waiter but
-- another name is refused, this step gives the kept name back. After PATIENCE_US the waiter moves to the queues of all
-- its names, with one time of arrival, later than that of every other waiter there. From then on, each name that
-- becomes free at its turn is kept for it. Two waiters cannot each keep a name that the other needs: a kept name goes
-- to an earlier arrival, and a waiter that was removed from one queue gets a new time of arrival in all queues.
--
-- With nested locks, a waiter behind this one may hold a lock that this one waits for. Locks that are nested in sorted
-- order form no cycle: see grant.lua. A kept name is also lent to a waiter that says that it holds the lock that
-- refuses us. Against other cycles, a kept name is lent to the next waiter that holds a lock: NESTED_US after this
-- waiter joined all queues, then after two, three, four times NESTED_US more, and so on. In the same way, but with
-- KEEPING_US, it is lent to the next waiter of any kind. The intervals grow, so long holds do not starve this waiter.
-- The waiter keeps its place, and is first again when the lent name is released.

-- include multi.lua

read_time()
-- Everything that can fail comes before the first write: Redis does not roll a script back.
local last, refused = last_fence_of_all()
if refused then
  return refused
end
if redis.call('EXISTS', all_keys(1, 3, 5)) == 0 then
  local fence
  for name = 1, NAMES do
    select_name(name)
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
    fence = mint(ARGV[1], last, '1', ARGV[3])
  end
  return fence
end
if redis.call('EXISTS', all_keys(5)) > 0 then
  return {-1, 0}
end

-- include queue.lua
-- include grant.lua

local PATIENCE_US = 100000
local KEEPING_US, NESTED_US = 2000000, 200000
local MAX_BEHIND = 50 -- how many waiters are searched for one that should go first
local token, since = ARGV[1], tonumber(ARGV[6])

local function take_all()
  local fence
  for name = 1, NAMES do
    select_name(name)
    if redis.call('GET', KEYS[1]) ~= token then
      redis.call('SET', KEYS[1], token, 'PX', ARGV[2])
    elseif redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
      redis.call('PEXPIRE', KEYS[1], ARGV[2])
    end
    remove_waiter(token)
    fence = mint(token, last, '1', ARGV[3])
  end
  return fence
end

-- Read the client's places and kept names from the keys: if a reply was lost, the client does not know them.
local places, owned = 0, 0
local waits_at, arrived, uneven
for name = 1, NAMES do
  select_name(name)
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
local window_ms = {} -- by name: how long its yield window still lasts
local mine = arrived and tonumber(arrived) or since -- its time of arrival; 0: behind all others
local other_kind, other_at
local refusing = {} -- the tokens of the holders that refuse it

-- Leave the queue of the selected name. If the name was kept for us or is free, it goes to the next waiter.
local function leave_queue()
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
    select_name(name)
    leave_queue()
    mine = math.max(mine, tonumber(arrival()))
  end
elseif not in_all and since > 0 then
  mine = math.min(mine, since)
end

local function is_before(score, other)
  return mine > 0 and (mine < score or (mine == score and token < other))
end

-- Whether no waiter for the selected name comes before us. If one does, that waiter gets the lock, which is free or
-- kept for another waiter. ``ready``: no name before this one was refused.
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
  local _, _, fences = request_of(entry)
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
  local kind = kind_of_name(front)
  if kind then
    other_kind, other_at = kind, KEYS[1]
    return false
  end
  if owner then -- if it is kept for a waiter, that waiter may be absent, unready, or a later arrival
    local score = redis.call('ZSCORE', KEYS[3], owner)
    refusing[owner] = not score
    local is_weaker = ready and score and (is_before(tonumber(score), owner) or is_kept_for_unready(owner))
    return score and (is_weaker or gives_way(owner, owner)) and is_our_turn(ready, owner)
  end
  local free_until = read_yield()
  if free_until > now and free_until - now <= LONGEST_YIELD_US then
    window_ms[name] = math.ceil((free_until - now) / 1000)
    return false
  end
  return is_our_turn(ready)
end

-- A waiter in one queue tries that name first: as long as the name is refused, the waiter keeps its place there. A
-- waiter in all queues waits for the first name that is refused.
local refused_at
local may = {}
local function try(name)
  if (in_all or not refused_at) and may[name] == nil then
    select_name(name)
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

-- Whether one of the growing intervals has ended since the last step of this waiter.
local function has_stood_for(first_us)
  local every_us, after_us, has_passed = first_us, first_us, false
  select_name(waits_at)
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

-- Lend the selected name, which is free or kept for us, to a waiter that should go first; returns whether there is one.
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

-- No fence is reserved for one name alone: the entry has '0' up to the refused name, '00' for names after it.
local ready_entry = now_us .. ' ' .. ARGV[2] .. ' ' .. ARGV[3] .. ' 0' .. ARGV[7] .. ' ' .. ARGV[5]
local unready_entry = now_us .. ' ' .. ARGV[2] .. ' ' .. ARGV[3] .. ' 00' .. ARGV[7] .. ' ' .. ARGV[5]
for name = 1, NAMES do
  select_name(name)
  if other_kind or ARGV[5] == '' or not (in_all or name == refused_at) then
    leave_queue()
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

select_name(refused_at)
local owner = redis.call('GET', KEYS[1])
local first = first_waiter()
local place = place_of(first, owner, token)
if place == 2 and ARGV[7] ~= '' then
  wake(owner)
end
-- Read the lock last: client tracking then reports the next write to it.
local left_ms = redis.call('PTTL', KEYS[1])
return {0, window_ms[refused_at] or left_ms, now, place, owner or '', KEYS[1]}
