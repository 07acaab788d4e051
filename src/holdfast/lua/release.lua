-- Give the lock back, if it is still ours: to the waiter who is next, if there is one.
--
-- KEYS 1 the lock   2 the last fence   3 the queue   4 its waiters
-- ARGV 1 token
--
-- Returns 1 freed, 0 the key is gone, -1 it is another owner's.
--
-- One step, because between a GET and a DEL the lease can end and the key can become another's; and because a lock
-- that is free for a moment goes to whoever happens to ask, not to whoever has waited longest. It frees before it
-- allocates, so that it works on a full server too.

local owner = redis.call('GET', KEYS[1])
if owner ~= ARGV[1] then
  return owner and -1 or 0
end
redis.call('DEL', KEYS[1])
if redis.call('EXISTS', KEYS[3]) == 0 then
  return 1
end

-- include fence.lua
-- include queue.lua
-- include grant.lua

read_time()
free_or_grant(head())
return 1
