-- Several names in one step: what the steps on them share. It has no ARGV and Returns nothing of its own. One step is
-- always one whole file: the other, with this one in it.
--
-- KEYS come in groups of five, a group for each name: 1 the lock   2 the last fence given out for this name
--      3 the queue   4 its waiters   5 the tombstone of this token
--
-- The files included here and later know KEYS[1] to KEYS[5] of one name, so these are made to be those of the name looked
-- at. None is made up: all of them were in KEYS.

local ALL = KEYS
local KEYS = {}
local NAMES = #ALL / 5

local function look_at(name)
  for place = 1, 5 do
    KEYS[place] = ALL[5 * (name - 1) + place]
  end
end

-- The keys of all names that are for the same thing.
local function each(...)
  local keys = {}
  for _, place in ipairs({...}) do
    for name = 1, NAMES do
      keys[#keys + 1] = ALL[5 * (name - 1) + place]
    end
  end
  return unpack(keys)
end

-- include fence.lua

-- The greatest of the last fences of all names; and an error reply, if one of them is too large. See fence.lua.
local function last_fence_of_all()
  local greatest
  for name = 1, NAMES do
    look_at(name)
    local last, refused = last_fence()
    if refused then
      return nil, refused
    elseif last and tonumber(last) > tonumber(greatest or 0) then
      greatest = last
    end
  end
  return greatest
end
