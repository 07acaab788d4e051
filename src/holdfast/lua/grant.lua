-- How the queue of a mutex moves on: what the steps that include this file, after queue.lua, share. It has no ARGV and
-- Returns nothing of its own. One step is always one whole file: the other, with this one in it.
--
-- KEYS, in every step: 1 the lock   2 the last fence given out for this name   3 the queue
--                      4 the waiters, each of whom wants so many fences; and '' -> until when the lock was last left free
--                        for those who only poll, and how often it was granted since. Of a name that is no mutex at the
--                        moment it says here of what kind it is

-- A lock that is always written over to the next would never be free for those who only poll. So now and then it is left
-- free for a moment: a twentieth of the time since the last such moment, but no longer than it takes the slowest of them
-- to come by (redis-py polls every 100 ms). Not in every hand-over, for most should be quick; and not in step with anybody.
local OPEN_US = 100000
local SHUT_US = 50000 -- at least so much lies between two, and up to twice that more by the dice of the clock,
local GRANTS = 8 -- and so many grants

local function last_free()
  local said = redis.call('HGET', KEYS[4], '') or ''
  local free_until, grants = string.match(said, '^(%d+) (%d+)$')
  return tonumber(free_until or 0), tonumber(grants or 0), string.match(said, '^%a+$')
end

local ENTRY = '^%d+ (%d+) (%d+) (%d+) (.+)$' -- what a waiter wants, after when it was last seen

-- Give a free lock to the next waiter. One with a subscriber is granted its full ttl, with a fence, and is notified. One
-- without has ended, or will be back: it is passed over if another one can be notified. A waiter of which that is not known,
-- and one that wants other names as well (0 fences), gets a short reservation, and its own next acquire makes it a grant.
-- The caller has looked up which waiter is first, because it often has to know that anyway.
local function grant(first, entry)
  local chosen = {first, string.match(entry, ENTRY)}
  local state = listeners(chosen[5])
  if state == ABSENT then
    for _, later in ipairs(redis.call('ZRANGE', KEYS[3], 1, 15)) do
      local theirs = redis.call('HGET', KEYS[4], later) or ''
      local other = {later, string.match(theirs, ENTRY)}
      local found = other[5] and is_present(theirs) and listeners(other[5]) or ABSENT
      if found ~= ABSENT then
        chosen, state = other, found
        break
      end
    end
  end
  local token, ttl_ms, retention_ms, fences, channel = unpack(chosen)
  if state == SUBSCRIBED and fences ~= '0' then
    local fence = mint(redis.call('GET', KEYS[2]), fences, retention_ms)
    strike_off(token)
    redis.call('SET', KEYS[1], token, 'PX', ttl_ms)
    notify_grant(channel, token, fence, -1)
  else
    strike_off(token)
    redis.call('SET', KEYS[1], token, 'PX', reservation_ms(ttl_ms))
    notify_ask(channel, token, 0)
  end
end

local function grant_next()
  local token, entry = head()
  if token then
    grant(token, entry)
  end
end

-- What becomes of a lock that was given back: it is left free for a moment, and whoever is next is told to come and ask
-- when that is over; or it is granted.
local function free_or_grant(token, entry)
  if not token then
    return
  end
  local free_until, grants = last_free()
  if free_until == 0 then
    free_until = now
  elseif grants >= GRANTS and now >= free_until + SHUT_US + free_until % (2 * SHUT_US) then
    local open_us = math.min(OPEN_US, math.max(5000, math.floor((now - free_until) / 20)))
    redis.call('HSET', KEYS[4], '', string.format('%.0f 0', now + open_us))
    notify_ask(string.match(entry, '(%S+)$'), token, math.ceil(open_us / 1000))
    return
  end
  redis.call('HSET', KEYS[4], '', string.format('%.0f %d', free_until, grants + 1))
  grant(token, entry)
end
