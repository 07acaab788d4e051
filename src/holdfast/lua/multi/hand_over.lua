-- Prepare a hold on several locks for adoption: it lasts one full ttl from now, and no late request can bring it back after
-- that.
--
-- KEYS five for each name, see include/multi.lua
-- ARGV 1 token   2 ttl in ms
--      3 how long the tombstones last, in ms (0: none, because every request was answered)
--
-- Returns 1 prepared, all of them; 0 one is gone; -1 one is another owner's. After 0 and -1 nothing was changed.
--
-- One step, because only the owner may change the ttl, ownership can end between a GET and a PEXPIRE, and a hold on
-- several locks has all of them or none.

-- include multi.lua

local found = 1
for name = 1, NAMES do
  select_name(name)
  local owner = redis.call('GET', KEYS[1])
  if owner ~= ARGV[1] then
    found = math.min(found, owner and -1 or 0)
  end
end
if found ~= 1 then
  return found
end
for name = 1, NAMES do
  select_name(name)
  local left_ms = redis.call('PTTL', KEYS[1])
  if left_ms >= 0 then -- always write: a full server does not stop a step after its first write
    redis.call('PEXPIRE', KEYS[1], math.max(left_ms, tonumber(ARGV[2])))
  end
  if ARGV[3] ~= '0' then
    redis.call('SET', KEYS[5], '', 'PX', ARGV[3])
  end
end
return 1
