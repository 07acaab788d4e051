-- Delete a key, if it still holds what the caller has put there. Locks of history that have a token end like this.
--
-- KEYS 1 the lock
-- ARGV 1 what it must hold
--
-- Returns 1 deleted, 0 it is gone or holds something else.
--
-- One step, because between a GET and a DEL the lock can end and the key can become another's.

if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
