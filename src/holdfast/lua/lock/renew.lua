-- Let our lease last at least one ttl from now. Never shorten it.
--
-- KEYS 1 the lock
-- ARGV 1 token   2 ttl in ms   3 if given: write the key even if it lasts longer, for a WAIT after it
--
-- Returns 1 renewed, 0 the key is gone, -1 it is another owner's.
--
-- One step, because only the owner may change the ttl, and ownership can end between a GET and a PEXPIRE.

local owner = redis.call('GET', KEYS[1])
if owner ~= ARGV[1] then
  return owner and -1 or 0
end
local left_ms = redis.call('PTTL', KEYS[1])
local ttl_ms = tonumber(ARGV[2])
if left_ms >= 0 and (left_ms < ttl_ms or ARGV[3]) then
  redis.call('PEXPIRE', KEYS[1], string.format('%.0f', math.max(left_ms, ttl_ms)))
  redis.call('EXISTS', KEYS[1]) -- our write ended client tracking of the key; a read starts it again
end
return 1
