-- Several names in one step. It includes fence.lua.
-- Several steps include this file. It uses no ARGV. Returns nothing itself. One step is the whole including file.
--
-- KEYS five for each name: 1 the lock   2 the last fence given out for this name   3 the queue   4 its waiters
--      5 the tombstone of this token
--
-- Other included files use KEYS[1] to KEYS[5] for one name. select_name sets these from the real KEYS.

local ALL = KEYS
local KEYS = {}
local NAMES = #ALL / 5

local function select_name(name)
  for number = 1, 5 do
    KEYS[number] = ALL[5 * (name - 1) + number]
  end
end

-- These keys of every name, by their numbers in the group.
local function all_keys(...)
  local keys = {}
  for _, number in ipairs({...}) do
    for name = 1, NAMES do
      keys[#keys + 1] = ALL[5 * (name - 1) + number]
    end
  end
  return unpack(keys)
end

-- include fence.lua

-- The greatest of the last fences of all names, and an error reply if there can be no next one. See last_fence.
local function last_fence_of_all()
  local greatest
  for name = 1, NAMES do
    select_name(name)
    local last, refused = last_fence()
    if refused then
      return nil, refused
    end
    if last and last > (greatest or 0) then
      greatest = last
    end
  end
  return greatest
end
