-- Several names in one step: what the steps on them share. It has no ARGV and Returns nothing of its own. One step is
-- always one whole file: the other, with this one in it.
--
-- KEYS come in groups of five, a group for each name: 1 the lock   2 the last fence given out for this name
--      3 the queue   4 its waiters   5 the tombstone of this token
--
-- The files included here know KEYS[1] to KEYS[5] of one name, so these are made to be those of the name looked at.
-- A waiter who wants several names stands in the queue of one of them, wanting 0 fences there: a grant of that name alone
-- is worth no fence to it.

local ALL = KEYS
local KEYS = {}
local NAMES = #ALL / 5

local function look_at(name)
  for place = 1, 5 do
    KEYS[place] = ALL[5 * (name - 1) + place]
  end
end

-- include fence.lua
-- include queue.lua
-- include grant.lua

-- The name looked at is free: let whoever is next have it. Who wants several is not given one of them, but told to come
-- and ask for all; meanwhile nobody who came later takes it away.
local function pass_on(given_back)
  local token, entry = head()
  if not token then
    return
  end
  local wants, channel = string.match(entry, ' (%d+) (%S+)$')
  if wants == '0' and is_heard(channel) then
    ring(channel, token, 0, 0)
  elseif given_back then
    free_or_grant()
  else
    grant_next()
  end
end
