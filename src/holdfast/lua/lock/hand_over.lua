-- Prepare a hold for adoption: it lasts one full ttl from now, and no late request can bring it back after that.
--
-- KEYS 1 the lock
--      2 the tombstone of this token
-- ARGV 1 token   2 ttl in ms
--      3 how long the tombstone lasts, in ms (0: none, because every request was answered)
--
-- Returns 1 prepared, 0 the key is gone, -1 it is another owner's.
--
-- One step, because only the owner may change the ttl, and ownership can end between a GET and a PEXPIRE.

local owner = redis.call('GET', KEYS[1])
if owner ~= ARGV[1] then
  return owner and -1 or 0
end
local left_ms = redis.call('PTTL', KEYS[1])
if left_ms >= 0 then -- always write: a full server does not stop a step after its first write
  redis.call('PEXPIRE', KEYS[1], math.max(left_ms, tonumber(ARGV[2])))
end
if ARGV[3] ~= '0' then
  redis.call('SET', KEYS[2], '', 'PX', ARGV[3])
end
return 1
