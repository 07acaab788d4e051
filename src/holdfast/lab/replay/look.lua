-- The state of a real server in a replay.
--
-- KEYS the lock, and its side keys
--
-- Returns the time, what the lock holds, and for each key its dump and what is left of its ttl in ms.
--
-- One step, so that every ttl is the ttl at that time.

local found = {redis.call('TIME'), redis.call('GET', KEYS[1])}
for _, key in ipairs(KEYS) do
  found[#found + 1] = {redis.call('DUMP', key), redis.call('PTTL', key)}
end
return found
