-- Release several locks, as far as they are still ours, and grant each to its next waiter.
--
-- KEYS five for each name, see include/multi.lua
-- ARGV 1 token
--
-- Returns 1 freed, all of them; 0 one was gone; -1 one was another owner's. The others are freed in any case.
--
-- One step, because between a GET and a DEL the lease can end and another client can take the key; and because a waiter for
-- several of the locks should find all of them free. It frees before it allocates, so it works on a full server too.

-- include multi.lua

local found = 1
local freed = {}
for name = 1, NAMES do
  select_name(name)
  local owner = redis.call('GET', KEYS[1])
  if owner == ARGV[1] then
    redis.call('DEL', KEYS[1])
    freed[#freed + 1] = name
  else
    found = math.min(found, owner and -1 or 0)
  end
end
if redis.call('EXISTS', all_keys(3)) == 0 then
  return found
end

-- include queue.lua
-- include grant.lua

read_time()
for _, name in ipairs(freed) do
  select_name(name)
  if redis.call('EXISTS', KEYS[3]) == 1 then
    free_or_grant(first_waiter())
  end
end
return found
