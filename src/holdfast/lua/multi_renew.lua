-- Make our lease on several locks last at least so long from now; never make it shorter.
--
-- KEYS the lock of each name
-- ARGV 1 token   2 ttl in ms
--
-- Returns 1 renewed, all of them; 0 one of them is gone; -1 one is another owner's, and nothing was changed.
--
-- One step, because only the owner may touch the ttl, and ownership can end between a GET and a PEXPIRE; and because a
-- lease on several locks is held in full or lost.

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
for name = 1, #KEYS do
  local left_ms = redis.call('PTTL', KEYS[name])
  if left_ms >= 0 and left_ms < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[name], ARGV[2])
    redis.call('EXISTS', KEYS[name]) -- read last: a client that has it watched is told of the next write, and ours was one
  end
end
return 1
