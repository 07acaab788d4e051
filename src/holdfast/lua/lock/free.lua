-- Delete a key if it still holds the caller's value. Recipes with a token release by this step.
--
-- KEYS 1 the lock
-- ARGV 1 the value
--
-- Returns 1 deleted, 0 the key is gone or holds another value.
--
-- One step, because between a GET and a DEL the lock can end and another client can take the key.

if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
