-- Show that many waiters of one client are alive, and learn which of them should send their acquire step.
--
-- KEYS three for each waiter: 1 the lock   2 the queue   3 the waiters
-- ARGV two for each waiter: its token, and the number of waiters in the local queue of this process
--
-- Returns {now_us, code, ...}: the server's time, and a code for each waiter. 0: nothing has changed, it can go on waiting.
--         1: it should ask, for one of these reasons: it is not in the queue (it was granted the lock, or was removed); the
--         lock is free; it is first in the queue and the holder's lease ends before the next of these steps; it is first in
--         the queue of a permit pool; one of the keys is of another type.
--
-- One step, because a waiter that is granted the lock between the read of its entry and the write to it must not return to
-- the queue. It never adds an entry, so after an abandon it leaves nothing behind. A step for a few hundred waiters takes
-- about a millisecond.

local ALL = KEYS
local KEYS = {} -- the keys of the current waiter, by the numbers that included files use

-- include fence.lua
-- include queue.lua
-- include grant.lua

local SOON_MS = 1500 -- three of these steps, which are half a second apart; = KEPT_MS in grant.lua
local QUEUE_MS = 5000 -- how long a queue lasts after its last refresh

-- Whether ``token`` is the first waiter of a permit pool, which has to ask. The first member of the queue is ''; absent
-- waiters behind it are removed. The keys of this queue may last longer than those of a mutex, and must not be
-- shortened.
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
    remove_waiter(first)
  end
  return false
end

local function should_ask(token, local_waiters)
  local entry, owner = redis.pcall('HGET', KEYS[4], token), redis.pcall('GET', KEYS[1])
  local request, channel = string.match(type(entry) == 'string' and entry or '', '^%d+( %d+ %d+ %S+ )%d+( .+)$')
  local arrived = request and redis.pcall('ZSCORE', KEYS[3], token)
  if type(arrived) ~= 'string' or type(owner) == 'table' then
    return true
  end
  entry = now_us .. request .. local_waiters .. channel
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
  if first_waiter(front) ~= token then
    return false
  end
  local left_ms = redis.call('PTTL', KEYS[1])
  return left_ms >= 0 and left_ms < SOON_MS
end

read_time()
local reply = {now}
for index = 1, #ARGV / 2 do
  KEYS[1], KEYS[3], KEYS[4] = ALL[3 * index - 2], ALL[3 * index - 1], ALL[3 * index]
  reply[#reply + 1] = should_ask(ARGV[2 * index - 1], ARGV[2 * index]) and 1 or 0
end
return reply
