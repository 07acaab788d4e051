-- Give several locks back, those that are still ours: each to the waiter who is next, if there is one.
--
-- KEYS five for each name, see several.lua
-- ARGV 1 token
--
-- Returns 1 freed, all of them; 0 one of them was gone; -1 one was another owner's (the others are freed all the same).
--
-- One step, because between a GET and a DEL the lease can end and the key can become another's; and because who waits for
-- several of them should find all of them free. It frees before it allocates, so that it works on a full server too.

-- include several.lua

local found = 1
local freed = {}
for name = 1, NAMES do
  look_at(name)
  local owner = redis.call('GET', KEYS[1])
  if owner == ARGV[1] then
    redis.call('DEL', KEYS[1])
    freed[#freed + 1] = name
  else
    found = math.min(found, owner and -1 or 0)
  end
end
if redis.call('EXISTS', each(3)) == 0 then
  return found
end

-- include queue.lua
-- include grant.lua

read_time()
for _, name in ipairs(freed) do
  look_at(name)
  if redis.call('EXISTS', KEYS[3]) == 1 then
    free_or_grant(head())
  end
end
return found
