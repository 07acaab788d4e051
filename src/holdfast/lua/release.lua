-- Give the lock back, if it is still ours.
--
-- KEYS 1 the lock
-- ARGV 1 token
--
-- Returns 1 freed, 0 the key is gone, -1 it is another owner's.
--
-- One step, because between a GET and a DEL the lease can end and the key can become another's.

local owner = redis.call('GET', KEYS[1])
if owner == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return owner and -1 or 0
