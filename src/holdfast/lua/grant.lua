-- How the queue of a mutex moves on: what the steps that include this file, after queue.lua, share. It has no ARGV and
-- Returns nothing of its own. One step is always one whole file: the other, with this one in it.
--
-- KEYS, in every step: 1 the lock   2 the last fence given out for this name   3 the queue
--                      4 the waiters, each of whom wants so many fences; and '' -> the end of the last yield window, the
--                        number of grants since, when a foreign token was last seen in the lock, and the beginning of
--                        the last window after one was. Of a name that is no mutex at the moment it says here of what
--                        kind it is

-- Yield windows: a lock that is always written over to the next waiter would never be free for clients that poll. So now
-- and then it stays free for a while, not in step with anything. If no foreign token was seen for a minute: a twentieth of
-- the time since the last window, and not in every hand-over. If one was: for one polling period (redis-py polls every
-- 100 ms, pottery every 100 ms on average, node-redlock every 200 ms), in turn with a time of about that length for the
-- queue, at least as long as foreign clients have just used it, so that they cannot get most of the time. The first foreign
-- grant ends such a window; windows that no poller uses become rare.
local OPEN_US = 100000 -- the length of a window,
local LEAST_OPEN_US = 5000 -- or, if no foreign token was seen, from here up to that
local SHUT_US = 50000 -- the least time between two windows; the last digits of the clock add up to 100 ms,
local GRANTS = 8 -- and so many grants, if no foreign token was seen
local POLLED_SHUT_US = 40000 -- the same, if one was seen
local POLLED_US = 60000000 -- how long a foreign token is remembered
local MOST_SHUT_US = 300000 -- what foreign clients have used is paid back by no more than this
local KEPT_MS = 1500 -- how long a lock is kept for a waiter that wants other names as well; each acquire step renews it
local FADING = 10 -- this part of the time since it was seen is added to the time between two windows

-- The end of the last window; of what kind the name is, if it is no mutex; the grants since; when a foreign token was seen;
-- the beginning of that window.
local function last_free()
  local said = redis.call('HGET', KEYS[4], '') or ''
  local free_until, grants, seen, opened = string.match(said, '^(%d+) (%d+) (%d+) (%d+)$')
  if not opened then
    return 0, string.match(said, '^%a+$'), 0, 0, 0
  end
  return tonumber(free_until), nil, tonumber(grants), tonumber(seen), tonumber(opened)
end

local function note_free(free_until, grants, seen, opened)
  redis.call('HSET', KEYS[4], '', string.format('%.0f %d %.0f %.0f', free_until, grants, seen, opened))
end

local function is_polled(seen)
  return math.abs(now - seen) <= POLLED_US
end

-- Remember an owner that is a client of another library, and end the window that it used. Our tokens end in '.' and at
-- least 22 hex digits.
local function note_foreign(owner)
  if owner and #(string.match(owner, '%.(%x+)$') or '') < 22 then
    local _, _, _, _, opened = last_free()
    note_free(now, 0, now, opened)
    redis.call('PEXPIRE', KEYS[4], POLLED_US / 1000)
  end
end

-- Let queue and waiters last beyond the silence of their waiters. What is remembered of foreign tokens may last longer.
local function keep_queue()
  redis.call('PEXPIRE', KEYS[3], 5000)
  if redis.call('PTTL', KEYS[4]) < 4000 then
    redis.call('PEXPIRE', KEYS[4], 5000)
  end
end

-- What a waiter wants: ttl, retention, fences and its channel. nil if its entry is not one of a mutex.
local function wanted(entry)
  local ttl_ms, retention_ms, fences, channel = string.match(entry, '^%d+ (%d+) (%d+) (%d+)%S* (.+)$')
  if channel and tonumber(fences) <= 64 then
    return ttl_ms, retention_ms, fences, channel
  end
end

local function is_reachable(_, entry)
  local _, _, _, channel = wanted(entry)
  return channel and listeners(channel) ~= ABSENT
end

-- A lock is kept for a waiter that wants other names as well: its token is in the key, and stays in the queue, which marks
-- the lock as kept. It becomes a hold only by the waiter's own acquire step, which takes all names or none. The waiter is
-- ready ('0' fences) if nothing refuses it the names that come before this one in sorted order, else unready ('00').
--
-- What is kept for an unready waiter must not block a client that others may wait for: one whose caller holds a lock, or a
-- ready waiter, for which other names may be kept. Both take it. So every client that blocks others waits only for
-- names that come later in sorted order, and there is no cycle, except by locks nested in another order.
local function is_unready(entry)
  return string.find(entry or '', '^%d+ %d+ %d+ 00') ~= nil
end

local function blocks_others(entry)
  return string.find(entry, '^%d+ %d+ %d+ 0[; ]') or string.find(entry, '^%d+ %d+ %d+ %d+;')
end

local function is_kept_for_unready(owner)
  return redis.call('ZSCORE', KEYS[3], owner) and is_unready(redis.call('HGET', KEYS[4], owner))
end

-- Whether the lock is kept for that owner and goes to another waiter all the same: because the owner has ended or was silent for a second, or
-- because ``token``, which asks, came earlier and is first in the queue. ``front`` is the first in the queue.
local function gives_way(owner, front, token)
  if owner == front then
    local entry = redis.call('HGET', KEYS[4], owner)
    return not (is_present(entry) and is_reachable(owner, entry))
  end
  return front == token and redis.call('ZSCORE', KEYS[3], owner)
end

-- What a refusal says of the queue: 1 if ``token`` is first in it, 2 if the lock is kept for the first, else 0.
local function place_of(first, owner, token)
  return first == token and 1 or owner and owner == first and 2 or 0
end

-- Notify a waiter that it is first in the queue, so that it has the lock watched.
local function notify_first(token, entry, pause_ms)
  local _, _, _, channel = wanted(entry)
  notify_ask(channel or '-', token, pause_ms)
end

-- A client asks for a lock that is kept for another waiter, and holds locks itself: perhaps what that waiter waits for. Let
-- that waiter look, with its own step, which knows all its names.
local function wake(token)
  notify_first(token, redis.call('HGET', KEYS[4], token) or '', 0)
end

-- Give a free lock to the next waiter. One with a subscriber is granted its full ttl, with a fence, and is notified. One
-- without has ended, or will be back: it is passed over if another one can be notified. A waiter of which that is not known
-- gets a short reservation, and its own next acquire makes it a grant. For one that wants other names as well (0 fences),
-- the lock is kept, unless it has no subscriber: then the lock stays free, and goes to the next client that asks.
-- If no fence can be given out, the lock stays free: the acquire of each waiter is then refused with the reason.
-- The caller has looked up which waiter is first, because it often has to know that anyway.
local function grant(token, entry)
  local last, refused = last_fence()
  if refused then
    return
  end
  local ttl_ms, retention_ms, fences, channel = wanted(entry)
  if not channel or listeners(channel) == ABSENT then
    local other, theirs = find_waiter(is_reachable)
    if other then
      token = other
      ttl_ms, retention_ms, fences, channel = wanted(theirs)
    end
  end
  if fences == '00' then
    local other, theirs = find_waiter(function(waiter, entry)
      return blocks_others(entry) and is_reachable(waiter, entry)
    end)
    if other then
      token = other
      ttl_ms, retention_ms, fences, channel = wanted(theirs)
    end
  end
  if not channel then
    strike_off(token)
  elseif fences == '0' or fences == '00' then
    if listeners(channel) ~= ABSENT then
      redis.call('SET', KEYS[1], token, 'PX', KEPT_MS)
      notify_ask(channel, token, 0)
    end
  elseif listeners(channel) == SUBSCRIBED then
    local fence = mint(last, fences, retention_ms)
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

-- What becomes of a lock that was given back: a yield window is opened, and the next waiter is told to ask when it is over
-- (at once, if a foreign token was seen: it has the lock watched, and so learns when the window is used); or it is granted.
local function free_or_grant(token, entry)
  if not token then
    return
  end
  local free_until, _, grants, seen, opened = last_free()
  local polled = is_polled(seen)
  local dice_us = free_until % 1000 * 100
  local shut_us = SHUT_US + dice_us
  if polled then
    local used_us = math.min(free_until - opened, MOST_SHUT_US)
    shut_us = math.max(POLLED_SHUT_US + dice_us, used_us) + (now - seen) / FADING
  end
  if free_until == 0 then
    free_until = now
  elseif (polled or grants >= GRANTS) and now >= free_until + shut_us then
    local open_us = polled and OPEN_US
      or math.min(OPEN_US, math.max(LEAST_OPEN_US, math.floor((now - free_until) / 20)))
    note_free(now + open_us, 0, seen, polled and now or 0)
    notify_first(token, entry, polled and 0 or math.ceil(open_us / 1000))
    return
  end
  note_free(free_until, grants + 1, seen, opened)
  grant(token, entry)
end
