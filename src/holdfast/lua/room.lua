-- A permit pool: its holders, and which waiter is next. What the steps of a semaphore and of a readers-writer lock share,
-- after fence.lua and queue.lua. It has no ARGV and Returns nothing of its own. One step is always one whole file: the
-- other, with this one in it.
--
-- KEYS, in every step: 1 the holders, with two entries for each: its token, by the end of its lease in us; and 'slot ' and
--                        its token, by its slot: the number of its permit, READER, or WRITER
--                      2 the last fence given out for this name
--                      3 the queue, with '' in front for as long as the pool is in use
--                      4 the waiters, and '' -> what kind of pool it is
--
-- Both entries are in one key, so that no holder can lose one of them without the other when a key is deleted. All slots
-- are less than all ends, so of n holders the first n entries are their slots and the other n their ends.
--
-- How much one wants is said in a word: 'n5' one of five permits, 'any' a reader's part, 'all' a writer's.
-- A holder whose lease has ended is not there. All keys end with the last lease, so that nothing stays for ever.

local WRITER, READER = -2, -1
local LEAST_END = 1099511627776 -- 2^40 us: more than any slot, less than any end
local MAX_MENDED = 2000 -- entries

local last -- the fence that was given out last, once it was read

local function slot_entry(token)
  return 'slot ' .. token
end

local function count()
  return redis.call('ZCARD', KEYS[1]) / 2
end

-- When the lease of a holder ends, in us, and its slot; nil if it is no holder.
local function hold_of(token)
  local ends = redis.call('ZSCORE', KEYS[1], token)
  local slot = ends and redis.call('ZSCORE', KEYS[1], slot_entry(token))
  if slot then
    return tonumber(ends), tonumber(slot)
  end
end

local function leave(token)
  redis.call('ZREM', KEYS[1], token, slot_entry(token))
end

-- Entries were added or removed by hand: keep the holders that have both of theirs. A pool that is too large for one step is
-- emptied. A holder that loses its hold by this is told, as it is when the key is deleted.
local function mend(entries)
  if entries > MAX_MENDED then
    redis.call('DEL', KEYS[1])
    return
  end
  local found, score = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES'), {}
  for number = 1, #found, 2 do
    score[found[number]] = tonumber(found[number + 1])
  end
  for number = 1, #found, 2 do
    local entry = found[number]
    local is_end = score[entry] >= LEAST_END
    local other = is_end and slot_entry(entry) or string.match(entry, '^slot (.+)$')
    if not other or not score[other] or (score[other] >= LEAST_END) == is_end then
      redis.call('ZREM', KEYS[1], entry)
    end
  end
end

-- Take out the holders whose lease has ended; whether there were any. More than one step should look at are left to the next
-- one, and count as holders until then.
local function purge()
  local found = false
  while searched < MAX_SEARCHED do
    local holders = count()
    if holders == 0 then
      return found
    end
    -- The last slot, and the ends that come first: there they are, if there are as many of either.
    local first = math.ceil(holders) - 1
    local entries = redis.call('ZRANGE', KEYS[1], first, first + (found and CHUNK or 1), 'WITHSCORES')
    local slot, ends = tonumber(entries[2]), tonumber(entries[4])
    if not ends or slot >= LEAST_END or ends < LEAST_END or holders % 1 > 0 then
      mend(2 * holders)
    elseif ends > now then
      return found
    else
      local ended = {}
      for number = 3, #entries, 2 do
        if tonumber(entries[number + 1]) <= now then
          ended[#ended + 1] = entries[number]
          ended[#ended + 1] = slot_entry(entries[number])
        end
      end
      redis.call('ZREM', KEYS[1], unpack(ended))
      searched = searched + #ended / 2
    end
    found = true
  end
  return found
end

local function is_amount(wanted)
  return wanted == 'any' or wanted == 'all' or string.find(wanted, '^n%d+$')
end

local function lowest_slot()
  return tonumber(redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2])
end

local function fits(wanted)
  local holders = count()
  if holders == 0 then
    return true
  end
  if wanted == 'all' or (wanted ~= 'any' and holders >= tonumber(string.sub(wanted, 2))) then
    return false
  end
  return lowest_slot() ~= WRITER
end

-- The lowest number that no permit has. The numbers are all different, so as many are in use below it as it says.
local function lowest_free()
  local low, high = 0, count()
  while low < high do
    local middle = math.floor((low + high) / 2)
    if tonumber(redis.call('ZRANGE', KEYS[1], middle, middle, 'WITHSCORES')[2]) == middle then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

-- Of what kind the pool is, by its holders; nil if there are none.
local function kind_of_holders()
  local slot = lowest_slot()
  return slot and (slot < 0 and 'rwlockpool' or 'semaphorepool')
end

-- Say in both keys of the queue that the name is a pool, of this kind: a client that wants it as a mutex meets a queue, and looks.
-- They last as long as the holders, and 5 s at least.
local function mark(kind)
  redis.call('ZADD', KEYS[3], 0, '')
  redis.call('HSET', KEYS[4], '', kind)
  local ms = math.max(5000, redis.call('PTTL', KEYS[1]), redis.call('PTTL', KEYS[3]))
  redis.call('PEXPIRE', KEYS[3], ms)
  redis.call('PEXPIRE', KEYS[4], ms)
end

-- See to it that both keys of the queue last that long. If there is none, the pool is new, or it was deleted by hand.
local function keep_queue(ms)
  local left_ms = redis.call('PTTL', KEYS[3])
  if left_ms == -2 then
    mark(kind_of_holders())
  elseif left_ms < ms then
    redis.call('PEXPIRE', KEYS[3], ms)
    redis.call('PEXPIRE', KEYS[4], ms)
  end
end

-- Let this holder's lease last that long, in its slot; and all keys beyond it.
local function hold(token, slot, lease_ms)
  local ends = string.format('%.0f', now + lease_ms * 1000)
  redis.call('ZADD', KEYS[1], ends, token, slot, slot_entry(token))
  local ms = lease_ms + 1000
  if redis.call('PTTL', KEYS[1]) < ms then
    redis.call('PEXPIRE', KEYS[1], ms)
  end
  keep_queue(ms)
end

-- Make a lease that ends then last that long at least: a request that is late must not make it shorter.
local function prolong(token, ends, slot, lease_ms)
  if ends < now + lease_ms * 1000 then
    redis.call('ZREM', KEYS[1], '') -- nothing; but a step that has begun to write may go on, even on a full server
    hold(token, slot, lease_ms)
  end
end

-- Make a waiter that fits a holder, for that long; its slot.
local function admit(token, wanted, lease_ms)
  local slot = wanted == 'all' and WRITER or wanted == 'any' and READER or lowest_free()
  hold(token, slot, lease_ms)
  return slot
end

-- The slot as it is told to clients: the number of a permit, else -1.
local function told(slot)
  return math.max(slot, -1)
end

-- Admit the waiters one after the other, as long as they fit. A waiter that does not fit lets none pass. One with a
-- subscriber is granted its full ttl, with a fence, and is notified; one without is passed over; one of which that is not
-- known gets a short reservation, and its own next acquire makes it a grant.
-- With ``me``, who asks just now: whether it is its turn, and it fits; and whether nobody is in front of it.
local function let_in(me, wanted)
  local kept = 0 -- passed over: they stay in the queue
  while searched < MAX_SEARCHED do
    local tokens = redis.call('ZRANGE', KEYS[3], kept, kept + CHUNK - 1)
    searched = searched + #tokens
    for _, token in ipairs(tokens) do
      local entry = token ~= '' and redis.call('HGET', KEYS[4], token)
      local ttl_ms, retention_ms, wants, channel = string.match(entry or '', '^%d+ (%d+) (%d+) (%a%w*) (.+)$')
      if token == me then
        return fits(wanted), true
      elseif token == '' then -- no waiter
        kept = kept + 1
      elseif not channel or not is_amount(wants) or not is_present(entry) then
        strike_off(token)
      else
        local state = listeners(channel)
        if state ~= ABSENT and not fits(wants) then
          return false, false
        elseif state == SUBSCRIBED then
          local refused
          if not last then
            last, refused = last_fence()
          end
          if refused then
            return false, false -- no fence can be given out: the acquire of each waiter is refused with the reason
          end
          last = mint(last, '1', retention_ms)
          strike_off(token)
          notify_grant(channel, token, last, told(admit(token, wants, tonumber(ttl_ms))))
        elseif state == UNKNOWN then
          strike_off(token)
          admit(token, wants, reservation_ms(ttl_ms))
          notify_ask(channel, token, 0)
        else
          kept = kept + 1
        end
      end
    end
    if #tokens < CHUNK then
      return me and fits(wanted), true
    end
  end
  return false, false -- more of them than one step should look at: the next one goes on
end

-- There is neither holder nor waiter: the name may be any kind of lock.
local function close_if_empty()
  if redis.call('EXISTS', KEYS[1]) == 0 and redis.call('ZCARD', KEYS[3]) <= 1 then
    redis.call('DEL', KEYS[3], KEYS[4])
  end
end
