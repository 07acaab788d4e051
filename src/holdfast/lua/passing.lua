-- How the queues of several names move on: what the steps that include this file, after several.lua, share. It has no ARGV
-- and Returns nothing of its own. One step is always one whole file: the other, with this one in it.
--
-- KEYS, of the name looked at: those of queue.lua and grant.lua, KEYS[1] to KEYS[4]. A waiter who wants several names stands
-- in the queue of one of them, wanting 0 fences there: a grant of that name alone is worth no fence to it.

-- include queue.lua
-- include grant.lua

-- The name looked at is free: let whoever is next have it. Who wants several is not given one of them, but told to come
-- and ask for all; meanwhile nobody who came later takes it away.
local function pass_on(given_back)
  local token, entry = head()
  if not token then
    return
  end
  local _, _, fences, channel = wanted(entry)
  if fences == '0' and listeners(channel) ~= ABSENT then
    notify_ask(channel, token, 0)
  elseif given_back then
    free_or_grant(token, entry)
  else
    grant(token, entry)
  end
end
