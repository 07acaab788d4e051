-- A room with so many places: who is inside, and who may come in next. What the steps of a semaphore and of a readers-writer
-- lock share, after fence.lua and queue.lua. It has no ARGV and Returns nothing of its own. One step is always one whole
-- file: the other, with this one in it.
--
-- KEYS, in every step: 1 those inside: token -> when its lease ends, in us
--                      2 the last fence given out for this name
--                      3 the queue, with '' in front for as long as the room is in use
--                      4 the waiters, and '' -> what kind of room it is
--                      5 the places: token -> its number, 0 for any reader, -1 for who has the room to itself
--
-- How much one wants is said in a word: 'n5' one of five numbered places, 'any' a place that has no number, 'all' of them.
-- Who is inside beyond its end is not there. All keys end with the last lease, so that nothing stays for ever.

local last -- the fence that was given out last, once it was read

local function leave(token)
  redis.call('ZREM', KEYS[1], token)
  redis.call('ZREM', KEYS[5], token)
end

-- Take out those whose lease has ended; whether there were any, and when the next one ends, in us.
local function purge()
  local found = false
  while true do
    local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
    local ends = tonumber(first[2])
    if not ends or ends > now then
      return found, ends
    end
    leave(first[1])
    found = true
  end
end

local function fits(wanted)
  local inside = redis.call('ZCARD', KEYS[1])
  if inside == 0 then
    return true
  end
  if wanted == 'all' or (wanted ~= 'any' and inside >= tonumber(string.sub(wanted, 2))) then
    return false
  end
  return tonumber(redis.call('ZRANGE', KEYS[5], 0, 0, 'WITHSCORES')[2] or 0) >= 0
end

-- The lowest number that nobody has. The numbers are all different, so those in use below it are as many as it says.
local function lowest_free()
  local low, high = 0, redis.call('ZCARD', KEYS[5])
  while low < high do
    local middle = math.floor((low + high) / 2)
    if tonumber(redis.call('ZRANGE', KEYS[5], middle, middle, 'WITHSCORES')[2]) == middle then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

-- See to it that the keys of those inside, or of the queue, last so long. They go when they are empty, and come back
-- without a ttl.
local function keep(one, other, ms)
  if redis.call('PTTL', KEYS[one]) < ms then
    redis.call('PEXPIRE', KEYS[one], ms)
    redis.call('PEXPIRE', KEYS[other], ms)
  end
end

local function keep_all(lease_ms)
  keep(1, 5, lease_ms + 1000)
  keep(3, 4, lease_ms + 1000)
end

-- Let somebody in who fits, for so long; its place.
local function seat(token, wanted, lease_ms)
  local place = wanted == 'all' and -1 or wanted == 'any' and 0 or lowest_free()
  redis.call('ZADD', KEYS[1], string.format('%.0f', now + lease_ms * 1000), token)
  redis.call('ZADD', KEYS[5], place, token)
  keep_all(tonumber(lease_ms))
  return place
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
      local entry = redis.call('HGET', KEYS[4], token)
      local ttl_ms, retention_ms, wants, channel = string.match(entry or '', '^%d+ (%d+) (%d+) (%a%w*) (.+)$')
      if token == me then
        return fits(wanted), true
      elseif token == '' then -- no waiter
        kept = kept + 1
      elseif not channel or not is_present(entry) then
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
          notify_grant(channel, token, last, seat(token, wants, ttl_ms))
        elseif state == UNKNOWN then
          strike_off(token)
          seat(token, wants, reservation_ms(ttl_ms))
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

-- Nobody is inside and nobody waits: the name may be any kind of lock.
local function close_if_empty()
  if redis.call('EXISTS', KEYS[1]) == 0 and redis.call('ZCARD', KEYS[3]) <= 1 then
    redis.call('DEL', KEYS[3], KEYS[4])
  end
end
