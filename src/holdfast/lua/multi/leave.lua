-- Let a hold end by itself after that time: its holder leaves, and does not renew it.
--
-- KEYS the locks: one, or several names
-- ARGV 1 token   2 how long they are held from now, in ms
--
-- Returns 1 all of them end then; 0 one is gone; -1 one is another owner's. After 0 and -1 nothing was changed.
--
-- One step, because only the owner may change the ttl, and ownership can end between a GET and a PEXPIRE. Only this
-- step can shorten a lease. If it is sent again, the lease ends that much later.

local found = 1
for name = 1, #KEYS do
  local owner = redis.call('GET', KEYS[name])
  if owner ~= ARGV[1] then
    found = math.min(found, owner and -1 or 0)
  end
end
if found == 1 then
  for name = 1, #KEYS do
    redis.call('PEXPIRE', KEYS[name], ARGV[2])
  end
end
return found
