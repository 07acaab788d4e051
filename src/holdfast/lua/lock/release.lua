-- Release the lock if it is still ours, and grant it to the next waiter.
--
-- KEYS 1 the lock   2 the last fence   3 the queue   4 its waiters
-- ARGV 1 token
--
-- Returns 1 freed, 0 the key is gone, -1 it is another owner's.
--
-- One step, because between a GET and a DEL the lease can end and another client can take the key; and because a lock that
-- is free in between goes to the client that happens to ask, not to the first waiter. It frees before it allocates, so it
-- works on a full server too.

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
free_or_grant(first_waiter())
return 1
