-- The queue of one name, for every kind of lock that has one.
-- Several steps include this file. It uses no ARGV. Returns nothing itself. One step is the whole including file.
--
-- KEYS 3 the queue: tokens, by time of arrival
--      4 the waiters: token -> when it was last seen (us), ttl in ms, retention of its fence in ms, request, number of
--        waiters in the local queue of its process, channel
--        The request depends on the kind: for a mutex the number of fences and the tokens that the caller holds, each
--        after ';'; for a permit pool the mode. The channel is '-' if the waiter has none and polls. Only inspectors
--        use the number of local waiters.
--        Two fields are not tokens (every token contains a dot): 'kind' (absent for a mutex), and 'yield' (grant.lua)
--
-- Times are those of the server, read once per step. A waiter refreshes its entry every half second. An entry that is
-- older than a second, or is not in this format, is removed.

local PRESENCE_US = 1000000
local MAX_DIGITS = 11 -- the most digits of a ttl or retention in ms: no option is longer than 366 days
local MAX_SEARCHED = 500 -- entries that one step may read in all its searches, because other clients wait meanwhile
local CHUNK = 50

local searched = 0

local function remove_waiter(token)
  redis.call('ZREM', KEYS[3], token)
  redis.call('HDEL', KEYS[4], token)
end

-- The kind that the name is in use as; nil for a mutex. ``front`` is the first member of the queue: '' for every other
-- kind. If '' is there and the kind is not, the waiters were deleted by hand, or an earlier version wrote them.
local function kind_of_name(front)
  return redis.call('HGET', KEYS[4], 'kind') or front == '' and 'permit pool or latch' or nil
end

local function is_present(entry)
  local seen, ttl_ms, retention_ms = string.match(entry or '', '^(%d+) ([1-9]%d*) ([1-9]%d*) %w%S* %d+ .')
  return seen and math.abs(now - seen) <= PRESENCE_US and #ttl_ms <= MAX_DIGITS and #retention_ms <= MAX_DIGITS
end

-- The first waiter that is present, and its entry. With ``fits``: the first for which fits(token, entry) is true.
-- Removes the absent waiters before it. Returns nil if there is none, or none within MAX_SEARCHED entries: then the
-- next step continues the search, and the lock goes to the next client that asks.
local function find_waiter(fits)
  local kept = 0 -- waiters that are present and do not fit
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

-- The first waiter that is present, and its entry. ``token``: the first in the queue, if the caller has read it already.
local function first_waiter(token)
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

-- The score of a new waiter: behind all others, even if the clock was set back. A last score that is not exact in a
-- double is not ours, and is ignored.
local function arrival()
  local tail = tonumber(redis.call('ZRANGE', KEYS[3], -1, -1, 'WITHSCORES')[2])
  return tail and tail >= now and tail < 9007199254740991 and string.format('%.0f', tail + 1) or now_us
end

-- Notify a waiter that it now holds the lock. The waiter knows its own ttl.
local function notify_grant(channel, token, fence, slot)
  redis.pcall('PUBLISH', channel, token .. ' ' .. fence .. ' ' .. now_us .. ' ' .. slot)
end

-- Ask a waiter to send its acquire step again, after that pause.
local function notify_ask(channel, token, pause_ms)
  if channel ~= '-' then
    redis.pcall('PUBLISH', channel, token .. ' ask ' .. now_us .. ' ' .. pause_ms)
  end
end

-- Whether a channel has a subscriber: SUBSCRIBED; ABSENT if its process has ended or has lost its subscription; UNKNOWN if
-- the channel is '-' or the ACL forbids PUBSUB NUMSUB.
local SUBSCRIBED, ABSENT, UNKNOWN = 1, 0, -1
local known = {} -- by channel, because many waiters may share one
local function subscription(channel)
  if not known[channel] then
    local found = channel ~= '-' and redis.pcall('PUBSUB', 'NUMSUB', channel)
    known[channel] = (not found or found.err) and UNKNOWN or found[2] > 0 and SUBSCRIBED or ABSENT
  end
  return known[channel]
end

-- How long a lock is reserved for a waiter that may be absent. The waiter's next acquire step turns it into a grant.
local function reservation_ms(ttl_ms)
  return math.min(750, tonumber(ttl_ms))
end
