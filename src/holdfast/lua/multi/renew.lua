-- Let our lease on several locks last at least one ttl from now. Never shorten it.
--
-- KEYS the locks
-- ARGV 1 token   2 ttl in ms   3 if given: write the keys even if they last longer, for a WAIT after it
--
-- Returns 1 renewed, all of them; 0 one is gone; -1 one is another owner's. After 0 and -1 nothing was changed.
--
-- One step, because only the owner may change the ttl, ownership can end between a GET and a PEXPIRE, and a hold on
-- several locks has all of them or none.

local found = 1
for name = 1, #KEYS do
  local owner = redis.call('GET', KEYS[name])
  if owner ~= ARGV[1] then
    found = math.min(found, owner and -1 or 0)
  end
end
if found ~= 1 then
  return found
end
local ttl_ms = tonumber(ARGV[2])
for name = 1, #KEYS do
  local left_ms = redis.call('PTTL', KEYS[name])
  if left_ms >= 0 and (left_ms < ttl_ms or ARGV[3]) then
    redis.call('PEXPIRE', KEYS[name], string.format('%.0f', math.max(left_ms, ttl_ms)))
    redis.call('EXISTS', KEYS[name]) -- our write ended client tracking of the key; a read starts it again
  end
end
return 1
