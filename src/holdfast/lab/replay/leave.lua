-- Remove the keys of a replay.
--
-- KEYS 1 the lock   the others: its side keys
-- ARGV what the replay has written to the lock
--
-- One step, because a client that takes the name between a GET and a DEL would lose its key. If the lock holds another
-- value, another client has taken the name meanwhile.

local value = redis.pcall('GET', KEYS[1])
local ours = false
for _, written in ipairs(ARGV) do
  ours = ours or value == written
end
for place, key in ipairs(KEYS) do
  if ours or place > 1 then
    redis.call('DEL', key)
  end
end
