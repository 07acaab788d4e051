-- How the queue of a mutex advances. Include queue.lua before it.
-- Several steps include this file. It uses no ARGV. Returns nothing itself. One step is the whole including file.
--
-- KEYS 1 the lock   2 the last fence given out for this name   3 the queue
--      4 the waiters; and 'yield' -> the end of the last yield window, the number of grants since, when a foreign token
--        was last seen in the lock, the start of the last window after that; times in us

-- Yield windows: a lock that always passes from waiter to waiter would never be free for polling clients. So it stays
-- free for a while now and then, at irregular times. If no foreign token was seen for a minute, a window lasts a
-- twentieth of the time since the last window. If one was seen, a window lasts one polling period (redis-py polls every
-- 100 ms, pottery every 100 ms on average, node-redlock every 200 ms). Then the queue has its turn, for about the same
-- time, and at least as long as foreign clients have just used the lock, but at most LONGEST_PAYBACK_US for this reason:
-- so short foreign holds cannot get most of the time. The first foreign grant ends such a window. Windows that no client
-- uses become rare.
local LONGEST_YIELD_US = 100000 -- the length of a window
local SHORTEST_YIELD_US = 5000 -- if no foreign token was seen, a window can be this short
local YIELD_AFTER_US = 50000 -- the least time between two windows; a jitter of up to 100 ms is added
local YIELD_AFTER_GRANTS = 8 -- if no foreign token was seen, the least number of grants between two windows
local POLLED_YIELD_AFTER_US = 40000 -- if a foreign token was seen, this replaces YIELD_AFTER_US
local POLLING_REMEMBERED_US = 60000000 -- how long a foreign token is remembered
local LONGEST_PAYBACK_US = 300000 -- the queue's turn lasts as long as foreign clients used the lock, up to this
local KEPT_MS = 1500 -- how long a lock is kept for a waiter that wants other names too; each acquire step renews it
local POLLED_FADING = 10 -- the time since a foreign token was seen, divided by this, is added between two windows

-- The end of the last window, the grants since, when a foreign token was last seen, the start of the window after that.
local function read_yield()
  local state = redis.call('HGET', KEYS[4], 'yield') or ''
  local free_until, grants, seen, opened = string.match(state, '^(%d+) (%d+) (%d+) (%d+)$')
  if not opened then
    return 0, 0, 0, 0
  end
  return tonumber(free_until), tonumber(grants), tonumber(seen), tonumber(opened)
end

local function write_yield(free_until, grants, seen, opened)
  redis.call('HSET', KEYS[4], 'yield', string.format('%.0f %d %.0f %.0f', free_until, grants, seen, opened))
end

local function is_polled(seen)
  return math.abs(now - seen) <= POLLING_REMEMBERED_US
end

-- If the owner is a client of another library, remember that, and end the window that it used. Our tokens end in '.' and
-- at least 22 hex digits.
local function note_foreign(owner)
  if owner and #(string.match(string.sub(owner, -40), '%.(%x+)$') or '') < 22 then
    local _, _, _, opened = read_yield()
    write_yield(now, 0, now, opened)
    redis.call('PEXPIRE', KEYS[4], POLLING_REMEMBERED_US / 1000)
  end
end

-- Let the keys of the queue last for 5 s, longer than a second without refresh. The waiters key may last longer, to
-- remember foreign tokens.
local function keep_queue()
  redis.call('PEXPIRE', KEYS[3], 5000)
  if redis.call('PTTL', KEYS[4]) < 4000 then
    redis.call('PEXPIRE', KEYS[4], 5000)
  end
end

-- The ttl, retention, fences and channel of a waiter. nil if its entry is not one of a mutex.
local function request_of(entry)
  local ttl_ms, retention_ms, fences, channel = string.match(entry, '^%d+ (%d+) (%d+) (%d+)%S* %d+ (.+)$')
  if channel and tonumber(fences) <= 64 then
    return ttl_ms, retention_ms, fences, channel
  end
end

local function is_reachable(_, entry)
  local _, _, _, channel = request_of(entry)
  return channel and subscription(channel) ~= ABSENT
end

-- A lock is *kept* for a waiter that wants other names too: the waiter's token is in the key and also still in the
-- queue. Only the waiter's own acquire step, which takes all names or none, turns this into a hold. The waiter is ready
-- ('0' fences) if it could have all names that come before this one in sorted order, else unready ('00').
--
-- A lock that is kept for an unready waiter must not block a client that others may wait for. Such a client is one
-- whose caller holds a lock, or a ready waiter, for which other names may be kept. Both take the lock from the unready
-- waiter. So every client that blocks others waits only for names that come later in sorted order. Then there is no
-- cycle, except by locks nested in another order.
local function is_unready(entry)
  return string.find(entry or '', '^%d+ %d+ %d+ 00') ~= nil
end

local function blocks_others(entry)
  return string.find(entry, '^%d+ %d+ %d+ 0[; ]') or string.find(entry, '^%d+ %d+ %d+ %d+;')
end

local function is_kept_for_unready(owner)
  return redis.call('ZSCORE', KEYS[3], owner) and is_unready(redis.call('HGET', KEYS[4], owner))
end

-- Whether the lock, which is kept for ``owner``, goes to another waiter: because the owner is absent or has no
-- subscriber, or because ``token``, the client that asks, is first in the queue. ``front`` is the first token in the
-- queue.
local function gives_way(owner, front, token)
  if owner == front then
    local entry = redis.call('HGET', KEYS[4], owner)
    return not (is_present(entry) and is_reachable(owner, entry))
  end
  return front == token and redis.call('ZSCORE', KEYS[3], owner)
end

-- The place in a refusal: 1 if ``token`` is first in the queue, 2 if the lock is kept for the first, else 0.
local function place_of(first, owner, token)
  return first == token and 1 or owner and owner == first and 2 or 0
end

-- Notify a waiter that it is first in the queue, so that it watches the lock.
local function notify_first(token, entry, pause_ms)
  local _, _, _, channel = request_of(entry)
  notify_ask(channel or '-', token, pause_ms)
end

-- Ask the waiter for which the lock is kept to send its own step, which knows all its names. This is needed if a client
-- that holds locks asks for this lock: the waiter may wait for the locks of that client.
local function wake(token)
  notify_first(token, redis.call('HGET', KEYS[4], token) or '', 0)
end

-- Give a free lock to ``token``, the first waiter.
-- If the waiter has a subscriber, it is granted the lock with its full ttl and a fence, and is notified.
-- If it has none, it has ended or will return: it is passed over if another waiter can be notified.
-- If its subscription is unknown, it gets a short reservation.
-- If it wants other names too (0 fences), the lock is kept for it; but if it has no subscriber, the lock stays free and
-- goes to the next client that asks.
-- If no fence can be given out, the lock stays free: the acquire step of each waiter is then refused with the reason.
local function grant(token, entry)
  local last, refused = last_fence()
  if refused then
    return
  end
  local ttl_ms, retention_ms, fences, channel = request_of(entry)
  if not channel or subscription(channel) == ABSENT then
    local other, theirs = find_waiter(is_reachable)
    if other then
      token = other
      ttl_ms, retention_ms, fences, channel = request_of(theirs)
    end
  end
  if fences == '00' then
    local other, theirs = find_waiter(function(waiter, entry)
      return blocks_others(entry) and is_reachable(waiter, entry)
    end)
    if other then
      token = other
      ttl_ms, retention_ms, fences, channel = request_of(theirs)
    end
  end
  if not channel then
    remove_waiter(token)
  elseif fences == '0' or fences == '00' then
    if subscription(channel) ~= ABSENT then
      redis.call('SET', KEYS[1], token, 'PX', KEPT_MS)
      notify_ask(channel, token, 0)
    end
  elseif subscription(channel) == SUBSCRIBED then
    local fence = mint(token, last, fences, retention_ms)
    remove_waiter(token)
    redis.call('SET', KEYS[1], token, 'PX', ttl_ms)
    notify_grant(channel, token, fence, -1)
  else
    remove_waiter(token)
    redis.call('SET', KEYS[1], token, 'PX', reservation_ms(ttl_ms))
    notify_ask(channel, token, 0)
  end
end

local function grant_next()
  local token, entry = first_waiter()
  if token then
    grant(token, entry)
  end
end

-- After a release: grant the lock; or open a yield window, and ask the first waiter to send its step again when the
-- window ends. If a foreign token was seen, the waiter sends it at once and watches the lock, so it learns when the
-- window is used.
local function free_or_grant(token, entry)
  if not token then
    return
  end
  local free_until, grants, seen, opened = read_yield()
  local polled = is_polled(seen)
  local jitter_us = free_until % 1000 * 100
  local yield_after_us = YIELD_AFTER_US + jitter_us
  if polled then
    local used_us = math.min(free_until - opened, LONGEST_PAYBACK_US)
    yield_after_us = math.max(POLLED_YIELD_AFTER_US + jitter_us, used_us) + (now - seen) / POLLED_FADING
  end
  if free_until == 0 then
    free_until = now
  elseif (polled or grants >= YIELD_AFTER_GRANTS) and now >= free_until + yield_after_us then
    local yield_us = polled and LONGEST_YIELD_US
      or math.min(LONGEST_YIELD_US, math.max(SHORTEST_YIELD_US, math.floor((now - free_until) / 20)))
    write_yield(now + yield_us, 0, seen, polled and now or 0)
    notify_first(token, entry, polled and 0 or math.ceil(yield_us / 1000))
    return
  end
  write_yield(free_until, grants + 1, seen, opened)
  grant(token, entry)
end
