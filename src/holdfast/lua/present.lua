-- Show that many waiters of one client are alive, and say which of them should send their acquire step.
--
-- KEYS three for each waiter: 1 the lock   2 the queue   3 the waiters
-- ARGV the token of each waiter
--
-- Returns {now_us, code, ...}: the time here, and for each waiter 0 if nothing has changed, so that it can go on waiting;
--         or 1 if it should ask: it has no place in the queue (it was granted the lock, or was struck off), the lock is free,
--         it is first in the queue and the holder's lease ends before the next of these steps, it is first in the queue of
--         a permit pool, or one of the keys is of another type.
--
-- One step, because a waiter that is granted the lock between a look at its entry and a write to it must not come back to
-- the queue. It never makes an entry, so one that arrives after the abandon of its waiter leaves nothing behind. A step for
-- a few hundred waiters takes about a millisecond.

local ALL = KEYS
local KEYS = {} -- of the waiter looked at, by the numbers that the included files know

-- include fence.lua
-- include queue.lua
-- include grant.lua

local SOON_MS = 1500 -- three of these steps, which are half a second apart; a lock that is kept lasts no longer
local QUEUE_MS = 5000 -- how long a queue lasts beyond the silence of its waiters

-- A permit pool has '' in front of its queue, and its first waiter asks by itself. Waiters in front that are not present are
-- struck off. The keys of its queue may last longer than those of a mutex, and must not be cut short.
local function is_first_in_pool(token)
  if redis.call('PTTL', KEYS[3]) < QUEUE_MS then
    redis.call('PEXPIRE', KEYS[3], QUEUE_MS)
    redis.call('PEXPIRE', KEYS[4], QUEUE_MS)
  end
  for _ = 1, 16 do
    local first = redis.call('ZRANGE', KEYS[3], 1, 1)[1]
    if first == token or is_present(redis.call('HGET', KEYS[4], first)) then
      return first == token
    end
    strike_off(first)
  end
  return false
end

local function should_ask(token)
  local entry, owner = redis.pcall('HGET', KEYS[4], token), redis.pcall('GET', KEYS[1])
  local wants = type(entry) == 'string' and string.match(entry, '^%d+( .+)$')
  local arrived = wants and redis.pcall('ZSCORE', KEYS[3], token)
  if type(arrived) ~= 'string' or type(owner) == 'table' then
    return true
  end
  entry = now_us .. wants
  redis.call('HSET', KEYS[4], token, entry)
  local front = redis.call('ZRANGE', KEYS[3], 0, 0)[1]
  if front == '' then
    return is_first_in_pool(token)
  end
  note_foreign(owner)
  keep_queue()
  if not owner or owner == token or (owner == front and gives_way(owner, front)) then
    return true
  end
  if head(front) ~= token then
    return false
  end
  local left_ms = redis.call('PTTL', KEYS[1])
  return left_ms >= 0 and left_ms < SOON_MS
end

read_time()
local said = {now}
for place, token in ipairs(ARGV) do
  KEYS[1], KEYS[3], KEYS[4] = ALL[3 * place - 2], ALL[3 * place - 1], ALL[3 * place]
  said[#said + 1] = should_ask(token) and 1 or 0
end
return said
