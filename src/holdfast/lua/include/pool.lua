-- A permit pool: the holders of a semaphore or a readers-writer lock, and its queue. Include queue.lua before.
-- Several steps include this file. It uses no ARGV. Returns nothing itself. One step is the whole including file.
--
-- KEYS 1 the holders; three members for each: its token, with the end of its lease (us) as score; 'slot ' and its token,
--        with its slot as score: the number of its permit, READER, or WRITER; and 'fence ' and its token, with its fence as
--        score, negated. Steps do not use that fence; it tells inspectors the fence and the start of each hold.
--      2 the last fences given out for this name
--      3 the queue, with '' in front while the pool is in use
--      4 the waiters, and 'kind' -> 'semaphore' or 'rwlock'
--
-- All members are in one key, so a holder cannot lose only some of them when a key is deleted. Fences and ends are
-- times, so their scores are far from those of slots. With n holders, the first n members are their fences, the next n
-- their slots, the last n their ends.
--
-- The mode of a request is 'n5' (one of five permits), 'any' (a reader) or 'all' (a writer).
-- A holder whose lease has ended does not count. All keys expire with the last lease.

local WRITER, READER = -2, -1
local LEAST_END = 1099511627776 -- 2^40 us: more than any slot, less than any end or fence
local NO_FENCE = '-1099511627776' -- the score of 'fence ' for a reservation, or if the fence was deleted by hand
local MAX_REPAIRED = 3000 -- members; a larger pool is emptied

local last -- the last fence given out, once it was read

local function slot_entry(token)
  return 'slot ' .. token
end

local function fence_entry(token)
  return 'fence ' .. token
end

local function holder_count()
  return redis.call('ZCARD', KEYS[1]) / 3
end

-- When the lease of a holder ends (us), and its slot; nil if the token holds nothing.
local function hold_of(token)
  local ends = redis.call('ZSCORE', KEYS[1], token)
  local slot = ends and redis.call('ZSCORE', KEYS[1], slot_entry(token))
  if slot then
    return tonumber(ends), tonumber(slot)
  end
end

local function remove_holder(token)
  redis.call('ZREM', KEYS[1], token, slot_entry(token), fence_entry(token))
end

-- What a member with that score should be; nil if there is none.
local function role_of(score)
  return score and (score >= LEAST_END and 'end' or score <= -LEAST_END and 'fence' or 'slot')
end

-- Repair a pool whose members were added or removed by hand, or by an earlier version, which writes no fences here.
-- Keep the holders that have an end and a slot. If the pool is too large for one step, empty it. Holders learn of their
-- loss as they do when the key is deleted.
local function repair()
  local found, score = redis.call('ZRANGE', KEYS[1], 0, MAX_REPAIRED, 'WITHSCORES'), {}
  if #found > 2 * MAX_REPAIRED then
    redis.call('DEL', KEYS[1])
    return
  end
  for number = 1, #found, 2 do
    score[found[number]] = tonumber(found[number + 1])
  end
  local belongs, unknown = {}, {}
  for number = 1, #found, 2 do
    local token = found[number]
    if role_of(score[token]) == 'end' and role_of(score[slot_entry(token)]) == 'slot' then
      belongs[token], belongs[slot_entry(token)], belongs[fence_entry(token)] = true, true, true
      if role_of(score[fence_entry(token)]) ~= 'fence' then
        unknown[#unknown + 1] = fence_entry(token)
      end
    end
  end
  redis.call('ZREM', KEYS[1], '') -- no effect, but a full server does not stop a step after its first write
  for number = 1, #found, 2 do
    if not belongs[found[number]] then
      redis.call('ZREM', KEYS[1], found[number])
    end
  end
  for _, entry in ipairs(unknown) do
    redis.call('ZADD', KEYS[1], NO_FENCE, entry)
  end
end

-- Remove the holders whose lease has ended; returns whether there were any. The work of one step is bounded: ended
-- leases beyond that count as holders until the next step.
local function remove_ended()
  local found = false
  while searched < MAX_SEARCHED do
    local holders = holder_count()
    if holders == 0 then
      return found
    end
    -- The last slot and the first ends. If they are not at these ranks, members were changed by hand.
    local first = math.ceil(2 * holders) - 1
    local entries = redis.call('ZRANGE', KEYS[1], first, first + (found and CHUNK or 1), 'WITHSCORES')
    local slot, ends = tonumber(entries[2]), tonumber(entries[4])
    if holders % 1 > 0 or role_of(slot) ~= 'slot' or role_of(ends) ~= 'end' then
      repair()
    elseif ends > now then
      return found
    else
      local ended = {}
      for number = 3, #entries, 2 do
        if tonumber(entries[number + 1]) <= now then
          ended[#ended + 1] = entries[number]
          ended[#ended + 1] = slot_entry(entries[number])
          ended[#ended + 1] = fence_entry(entries[number])
        end
      end
      redis.call('ZREM', KEYS[1], unpack(ended))
      searched = searched + #ended / 3
    end
    found = true
  end
  return found
end

local function is_mode(mode)
  return mode == 'any' or mode == 'all' or string.find(mode, '^n%d+$')
end

-- The lowest slot, if there are that many holders; nil if there is none. The lowest slot comes directly after the last
-- fence. If one of them is not at its rank, members were changed by hand.
local function lowest_slot(holders)
  while holders > 0 do
    local rank = math.ceil(holders) - 1 -- of the last fence
    local entries = redis.call('ZRANGE', KEYS[1], rank, rank + 1, 'WITHSCORES')
    local slot = tonumber(entries[4])
    if role_of(tonumber(entries[2])) == 'fence' and role_of(slot) == 'slot' then
      return slot
    end
    repair()
    holders = holder_count()
  end
end

local function fits(mode)
  local holders = holder_count()
  if holders == 0 then
    return true
  end
  if mode == 'all' or (mode ~= 'any' and holders >= tonumber(string.sub(mode, 2))) then
    return false
  end
  return lowest_slot(holders) ~= WRITER
end

-- The lowest number that no permit has. All numbers differ, so if no lower number is free, permit n is at rank n of the
-- slots.
local function lowest_free_slot()
  local holders = holder_count()
  local low, high = 0, holders
  while low < high do
    local middle = math.floor((low + high) / 2)
    local rank = holders + middle
    if tonumber(redis.call('ZRANGE', KEYS[1], rank, rank, 'WITHSCORES')[2]) == middle then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

-- The kind of a pool that has a holder in that slot; nil if there is none.
local function kind_of_slot(slot)
  return slot and (slot < 0 and 'rwlock' or 'semaphore')
end

-- Write the kind into both keys of the queue: a step for a mutex finds the queue and reads the kind. They last as long as
-- the holders, and at least 5 s.
local function mark_kind(kind)
  redis.call('ZADD', KEYS[3], 0, '')
  redis.call('HSET', KEYS[4], 'kind', kind)
  local ms = math.max(5000, redis.call('PTTL', KEYS[1]), redis.call('PTTL', KEYS[3]))
  redis.call('PEXPIRE', KEYS[3], ms)
  redis.call('PEXPIRE', KEYS[4], ms)
end

-- Let both keys of the queue last at least that long. If there is no queue, the pool is new or a key was deleted by
-- hand: then write the kind, which follows from the slot of a holder.
local function keep_queue(ms, slot)
  local left_ms = redis.call('PTTL', KEYS[3])
  if left_ms == -2 then
    mark_kind(kind_of_slot(slot))
  elseif left_ms < ms then
    redis.call('PEXPIRE', KEYS[3], ms)
    redis.call('PEXPIRE', KEYS[4], ms)
  end
end

-- Write a hold in that slot, for that long; if it is new, with its negated fence. All keys last longer than the hold.
local function write_hold(token, slot, lease_ms, fence)
  local ends = string.format('%.0f', now + lease_ms * 1000)
  if fence then
    redis.call('ZADD', KEYS[1], ends, token, slot, slot_entry(token), fence, fence_entry(token))
  else
    redis.call('ZADD', KEYS[1], ends, token, slot, slot_entry(token))
  end
  local ms = lease_ms + 1000
  if redis.call('PTTL', KEYS[1]) < ms then
    redis.call('PEXPIRE', KEYS[1], ms)
  end
  keep_queue(ms, slot)
end

-- Let a lease that ends at ``ends`` last at least that long: a late request must not shorten it.
local function prolong(token, ends, slot, lease_ms)
  if ends < now + lease_ms * 1000 then
    redis.call('ZREM', KEYS[1], '') -- no effect, but a full server does not stop a step after its first write
    write_hold(token, slot, lease_ms)
  end
end

-- Make ``token``, which fits, a holder for that long; returns its slot. Without a fence, this is a reservation.
local function admit(token, mode, lease_ms, fence)
  local slot = mode == 'all' and WRITER or mode == 'any' and READER or lowest_free_slot()
  write_hold(token, slot, lease_ms, fence and '-' .. fence or NO_FENCE)
  return slot
end

-- Give a holder its next fence, and return it.
local function renew_fence(token, retention_ms)
  local fence = mint(token, last, '1', retention_ms)
  local score = '-' .. fence
  redis.call('ZADD', KEYS[1], score, fence_entry(token))
  last = tonumber(fence)
  return fence
end

-- The slot as it is sent to clients: the number of a permit, else -1.
local function client_slot(slot)
  return math.max(slot, -1)
end

-- Admit waiters in order while they fit. If a waiter does not fit, all waiters behind it wait too. If a waiter has a
-- subscriber, it is granted a permit with its full ttl and a fence, and is notified. If it has none, it is passed over.
-- If its subscription is unknown, it gets a short reservation. ``me`` is the token that asks. Returns whether it is at
-- its turn and fits, and whether no waiter is before it. If none of MAX_SEARCHED waiters can be admitted, as after the
-- death of a process with very many, ``me`` is at its turn: it does not wait until all of them are removed.
local function admit_waiters(me, mode)
  local kept = 0 -- waiters that are passed over and stay in the queue
  local admitted = false
  while searched < MAX_SEARCHED do
    local tokens = redis.call('ZRANGE', KEYS[3], kept, kept + CHUNK - 1)
    searched = searched + #tokens
    for _, token in ipairs(tokens) do
      local entry = token ~= '' and redis.call('HGET', KEYS[4], token)
      local ttl_ms, retention_ms, their_mode, channel = string.match(entry or '', '^%d+ (%d+) (%d+) (%a%w*) %d+ (.+)$')
      if token == me then
        return fits(mode), true
      elseif token == '' then -- not a waiter: it marks the queue of a pool
        kept = kept + 1
      elseif not channel or not is_mode(their_mode) or not is_present(entry) then
        remove_waiter(token)
      else
        local state = subscription(channel)
        if state ~= ABSENT and not fits(their_mode) then
          return false, false
        elseif state == SUBSCRIBED then
          admitted = true
          local refused
          if not last then
            last, refused = last_fence()
          end
          if refused then
            return false, false -- no fence can be given out: each acquire step is refused with the reason
          end
          local fence = mint(token, last, '1', retention_ms)
          last = tonumber(fence)
          remove_waiter(token)
          notify_grant(channel, token, fence, client_slot(admit(token, their_mode, tonumber(ttl_ms), fence)))
        elseif state == UNKNOWN then
          admitted = true
          remove_waiter(token)
          admit(token, their_mode, reservation_ms(ttl_ms))
          notify_ask(channel, token, 0)
        else
          kept = kept + 1
        end
      end
    end
    if #tokens < CHUNK then
      return me and fits(mode), true
    end
  end
  local turn = not admitted -- else the next step continues
  return turn and me and fits(mode), turn
end

-- If there is neither holder nor waiter, free the name for any kind of lock.
local function delete_if_unused()
  if redis.call('EXISTS', KEYS[1]) == 0 and redis.call('ZCARD', KEYS[3]) <= 1 then
    redis.call('DEL', KEYS[3], KEYS[4])
  end
end
