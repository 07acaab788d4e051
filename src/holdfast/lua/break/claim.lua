-- An operator ends the computation of a cached value: the claim is free, and the waiters look again.
--
-- KEYS 1 the entry   2 the claim   3 the waiters   4 the failure   5 the history   6 the tombstone of the token
-- ARGV 1 the token   2 the holder, the operator and the reason, for the history
--
-- Returns {1, 0, us}   broken at that time; a claim has no fence, and what its holder computes is not stored
--         {0, 0, 0}    nothing was changed: the claim is gone, or another caller's
--
-- One step, because between the check and the deletion another caller can get the claim.

-- include cache.lua
-- include broken.lua

if redis.call('GET', KEYS[2]) ~= ARGV[1] then
  return not_held()
end
read_time()
local lease_ms = redis.call('PTTL', KEYS[2])
redis.call('DEL', KEYS[2])
record('0', '0', ARGV[2], lease_ms)
notify_all()
return {1, '0', now_us}
