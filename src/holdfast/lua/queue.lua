-- The queue of those who wait for one lock, of whatever kind: what the steps that include this file share. It has no ARGV
-- and Returns nothing of its own. One step is always one whole file: the other, with this one in it.
--
-- KEYS, in every step: 3 the queue: tokens by time of arrival
--                      4 the waiters: token -> when it was last seen, its ttl in ms, how long its fence is remembered,
--                        how much it wants (a matter of its kind; of a mutex with the tokens that its caller holds, each
--                        behind ';'), and its notification channel ('-': it has none and asks again by itself)
--
-- Time is the server's, read once a step. A waiter shows that it lives by asking again every half second. One that
-- has not for a second is struck off, and so is an entry that is not in our format.

local PRESENCE_US = 1000000
local MAX_DIGITS = 11 -- of a ttl or retention in ms: no option is longer than 366 days
local MAX_SEARCHED = 500 -- entries that one step looks at, over all its searches: other clients wait meanwhile
local CHUNK = 50

local searched = 0

local function strike_off(token)
  redis.call('ZREM', KEYS[3], token)
  redis.call('HDEL', KEYS[4], token)
end

local function is_present(entry)
  local seen, ttl_ms, retention_ms = string.match(entry or '', '^(%d+) ([1-9]%d*) ([1-9]%d*) %w%S* .')
  return seen and math.abs(now - seen) <= PRESENCE_US and #ttl_ms <= MAX_DIGITS and #retention_ms <= MAX_DIGITS
end

-- The first waiter that is present, and its entry. With ``fits``: the first for which fits(token, entry) is true. Entries
-- of waiters that are not present are struck off on the way. nil if there is none, or none within MAX_SEARCHED entries:
-- then the next step goes on, and the lock goes to the next client that asks for it.
local function find_waiter(fits)
  local kept = 0 -- present, but they do not fit
  while searched < MAX_SEARCHED do
    local tokens = redis.call('ZRANGE', KEYS[3], kept, kept + CHUNK - 1)
    local found, entry
    local absent = {}
    for _, token in ipairs(tokens) do
      searched = searched + 1
      entry = redis.call('HGET', KEYS[4], token)
      if not is_present(entry) then
        absent[#absent + 1] = token
      elseif fits and not fits(token, entry) then
        kept = kept + 1
      else
        found = token
        break
      end
    end
    if absent[1] then
      redis.call('ZREM', KEYS[3], unpack(absent))
      redis.call('HDEL', KEYS[4], unpack(absent))
    end
    if found or #tokens < CHUNK then
      return found, found and entry
    end
  end
end

-- The first waiter that is present, and its entry. ``token`` is the first in the queue, if the caller has read that already.
local function head(token)
  token = token or redis.call('ZRANGE', KEYS[3], 0, 0)[1]
  if not token then
    return nil
  end
  local entry = redis.call('HGET', KEYS[4], token)
  if is_present(entry) then
    return token, entry
  end
  return find_waiter()
end

-- The score of a new waiter: behind all others, also if the clock was set back. Scores that are not exact were not ours.
local function arrival()
  local tail = tonumber(redis.call('ZRANGE', KEYS[3], -1, -1, 'WITHSCORES')[2])
  return tail and tail >= now and tail < 9007199254740991 and string.format('%.0f', tail + 1) or now_us
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
local known = {} -- by channel: many waiters may share one
local function listeners(channel)
  if not known[channel] then
    local found = channel ~= '-' and redis.pcall('PUBSUB', 'NUMSUB', channel)
    known[channel] = (not found or found.err) and UNKNOWN or found[2] > 0 and SUBSCRIBED or ABSENT
  end
  return known[channel]
end

-- How long a lock is reserved for a waiter that may not be there: its own next acquire step makes it a grant.
local function reservation_ms(ttl_ms)
  return math.min(750, tonumber(ttl_ms))
end
