-- The queue of those who wait for one lock, of whatever kind: what the steps that include this file share. It has no ARGV
-- and Returns nothing of its own. One step is always one whole file: the other, with this one in it.
--
-- KEYS, in every step: 3 the queue: tokens by time of arrival
--                      4 the waiters: token -> when it was last seen, its ttl in ms, how long its fence is remembered,
--                        how much it wants (a matter of its kind), and its notification channel ('-': it has none and
--                        asks again by itself)
--
-- Time is the server's, read once a step. A waiter shows that it lives by asking again every half second. One that
-- has not for a second is struck off.

local PRESENCE_US = 1000000

local function strike_off(token)
  redis.call('ZREM', KEYS[3], token)
  redis.call('HDEL', KEYS[4], token)
end

local function is_present(entry)
  local seen = string.match(entry or '', '^%d+ ')
  return seen and math.abs(now - seen) <= PRESENCE_US
end

-- Who is next and alive, and its entry; those in front of it who are not are struck off. ``token`` is who stands in front,
-- if the caller has seen that already.
local function head(token)
  while true do
    token = token or redis.call('ZRANGE', KEYS[3], 0, 0)[1]
    if not token then
      return nil
    end
    local entry = redis.call('HGET', KEYS[4], token)
    if is_present(entry) then
      return token, entry
    end
    strike_off(token)
    token = nil
  end
end

-- Notify a waiter that it holds the lock now. The notification has no duration: the waiter knows its own ttl.
local function notify_grant(channel, token, fence, slot)
  redis.pcall('PUBLISH', channel, token .. ' ' .. fence .. ' ' .. now_us .. ' ' .. slot)
end

-- Notify a waiter that its acquire step should be sent again, after that pause.
local function notify_ask(channel, token, pause_ms)
  if channel ~= '-' then
    redis.pcall('PUBLISH', channel, token .. ' ask ' .. now_us .. ' ' .. pause_ms)
  end
end

-- What this server knows of a channel: SUBSCRIBED, ABSENT (its process has ended, or has lost its subscriber), or
-- UNKNOWN ('-', or this user may not ask).
local SUBSCRIBED, ABSENT, UNKNOWN = 1, 0, -1
local function listeners(channel)
  local found = channel ~= '-' and redis.pcall('PUBSUB', 'NUMSUB', channel)
  if not found or found.err then
    return UNKNOWN
  end
  return found[2] > 0 and SUBSCRIBED or ABSENT
end

-- How long a lock is reserved for a waiter that may not be there: its own next acquire step makes it a grant.
local function reservation_ms(ttl_ms)
  return math.min(750, tonumber(ttl_ms))
end
