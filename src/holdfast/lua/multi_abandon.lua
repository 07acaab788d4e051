-- Give up: those of several locks that are ours or kept for us, the places in queues, and what may still be on its way.
--
-- KEYS five for each name, see several.lua
-- ARGV 1 token   2 how long the tombstones stand, in ms (0: none is needed, every request was answered)
--
-- Returns {freed, buried}: freed is 1 freed, all of them; 0 one of them is gone; -1 one is another owner's;
--         buried is 1, or 0 if there was no memory for the tombstones (send it again later).
--
-- One step, for the reasons that abandon.lua has. A tombstone for each name, because they need not stay together: the
-- same token may be sent for some of them only.

-- include several.lua
-- include queue.lua
-- include grant.lua

local found = 1
local open = {}
read_time()
for name = 1, NAMES do
  look_at(name)
  local owner = redis.call('GET', KEYS[1])
  if owner == ARGV[1] then
    redis.call('DEL', KEYS[1])
    open[#open + 1] = name
  else
    found = math.min(found, owner and -1 or 0)
  end
  if redis.call('EXISTS', KEYS[3]) == 1 then
    local was_first = redis.call('ZRANGE', KEYS[3], 0, 0)[1] == ARGV[1]
    strike_off(ARGV[1])
    if was_first and not owner then
      open[#open + 1] = name
    elseif was_first and owner ~= ARGV[1] then
      local next_token, entry = head()
      if next_token then
        notify_first(next_token, entry, 0)
      end
    end
  end
end

local buried = 1
if ARGV[2] ~= '0' then
  for name = 1, NAMES do
    look_at(name)
    local stone = redis.pcall('SET', KEYS[5], '', 'PX', ARGV[2])
    buried = stone.err and 0 or buried
  end
end
for _, name in ipairs(open) do
  look_at(name)
  grant_next()
end
return {found, buried}
