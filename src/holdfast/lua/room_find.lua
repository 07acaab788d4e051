-- Which of these hold the permit pool?
--
-- KEYS 1 the holders (2 to 4 as in every step of a pool)
-- ARGV the tokens asked about
--
-- Returns for each of them 1 if it is a holder, else 0.
--
-- One step, because one request should serve all the holds that a client has on a pool. It reads the key whatever it finds
-- there, and changes nothing: a client that has it watched is told of the next write.

-- include fence.lua

read_time()
local found = {}
for number, token in ipairs(ARGV) do
  local ends = redis.pcall('ZSCORE', KEYS[1], token)
  -- If the key is of another type, nobody holds the pool. Of any other error we do not know what it means for us.
  if type(ends) == 'table' and not string.find(ends.err, 'WRONGTYPE', 1, true) then
    return ends
  end
  local slot_entry = 'slot ' .. token -- see room.lua
  local held = type(ends) == 'string' and tonumber(ends) > now and redis.call('ZSCORE', KEYS[1], slot_entry)
  found[number] = held and 1 or 0
end
return found
