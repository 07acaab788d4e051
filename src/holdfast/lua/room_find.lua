-- Which of these are inside?
--
-- KEYS 1 those inside (2 to 5 as in every step of a room)
-- ARGV the tokens asked about
--
-- Returns for each of them 1 if it is inside, else 0.
--
-- One step, because one request should serve all the holds that a client has in a room. It reads the key whatever it finds
-- there, and changes nothing: a client that has it watched is told of the next write.

-- include fence.lua

read_time()
local found = {}
for number, token in ipairs(ARGV) do
  local ends = redis.pcall('ZSCORE', KEYS[1], token)
  -- If somebody has put something else there, nobody is inside. Of any other error we do not know what it means for us.
  if type(ends) == 'table' and not string.find(ends.err, 'WRONGTYPE', 1, true) then
    return ends
  end
  found[number] = type(ends) == 'string' and tonumber(ends) > now and 1 or 0
end
return found
