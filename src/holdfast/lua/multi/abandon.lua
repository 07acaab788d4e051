-- Give up: free the locks that are ours or kept for us, leave the queues, and refuse requests that are still on their way.
--
-- KEYS five for each name, see include/multi.lua
-- ARGV 1 token   2 how long the tombstones last, in ms (0: none, because every request was answered)
--
-- Returns {freed, buried}: freed is 1 all of them freed, 0 one is gone, -1 one is another owner's;
--         buried is 1, or 0 if the server had no memory for the tombstones (send the step again later).
--
-- One step, as lock/abandon.lua is. Each name has its own tombstone, because the token may be sent for some names only.

-- include multi.lua
-- include queue.lua
-- include grant.lua

local found = 1
local open = {}
read_time()
for name = 1, NAMES do
  select_name(name)
  local owner = redis.call('GET', KEYS[1])
  if owner == ARGV[1] then
    redis.call('DEL', KEYS[1])
    open[#open + 1] = name
  else
    found = math.min(found, owner and -1 or 0)
  end
  if redis.call('EXISTS', KEYS[3]) == 1 then
    local was_first = redis.call('ZRANGE', KEYS[3], 0, 0)[1] == ARGV[1]
    remove_waiter(ARGV[1])
    if was_first and not owner then
      open[#open + 1] = name
    elseif was_first and owner ~= ARGV[1] then
      local next_token, entry = first_waiter()
      if next_token then
        notify_first(next_token, entry, 0)
      end
    end
  end
end

local buried = 1
if ARGV[2] ~= '0' then
  for name = 1, NAMES do
    select_name(name)
    local tombstone = redis.pcall('SET', KEYS[5], '', 'PX', ARGV[2])
    buried = tombstone.err and 0 or buried
  end
end
for _, name in ipairs(open) do
  select_name(name)
  grant_next()
end
return {found, buried}
