-- Make a hold on several locks ready to be adopted: it lasts one whole ttl from now, and no late request can bring it back
-- after that.
--
-- KEYS five for each name, see several.lua
-- ARGV 1 token   2 ttl in ms
--      3 how long the tombstones stand, in ms (0: none are needed, every request was answered)
--
-- Returns 1 all of them are there; 0 one of them is gone; -1 one is another owner's, and nothing was changed.
--
-- One step, because only the owner may touch the ttl, and ownership can end between a GET and a PEXPIRE; and because a
-- lease on several locks is held in full or lost.

-- include several.lua

local found = 1
for name = 1, NAMES do
  look_at(name)
  local owner = redis.call('GET', KEYS[1])
  if owner ~= ARGV[1] then
    found = math.min(found, owner and -1 or 0)
  end
end
if found ~= 1 then
  return found
end
for name = 1, NAMES do
  look_at(name)
  local left_ms = redis.call('PTTL', KEYS[1])
  if left_ms >= 0 then -- written in any case, for a step that has begun to write may go on, even on a full server
    redis.call('PEXPIRE', KEYS[1], math.max(left_ms, tonumber(ARGV[2])))
  end
  if ARGV[3] ~= '0' then
    redis.call('SET', KEYS[5], '', 'PX', ARGV[3])
  end
end
return 1
