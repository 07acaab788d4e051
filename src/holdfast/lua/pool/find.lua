-- Which of these tokens hold a permit of the pool?
--
-- KEYS 1 the holders (2 to 4 as in every step of a pool)
-- ARGV the tokens
--
-- Returns 1 for each token that holds a permit, else 0.
--
-- One step, because one request serves all holds that a client has on a pool. It always reads the key and never writes it:
-- client tracking then reports the next write.

-- include fence.lua

read_time()
local found = {}
for number, token in ipairs(ARGV) do
  local ends = redis.pcall('ZSCORE', KEYS[1], token)
  -- A key of another type has no holders. Any other error is for the client.
  if type(ends) == 'table' and not string.find(ends.err, 'WRONGTYPE', 1, true) then
    return ends
  end
  local slot_entry = 'slot ' .. token -- as in include/pool.lua
  local held = type(ends) == 'string' and tonumber(ends) > now and redis.call('ZSCORE', KEYS[1], slot_entry)
  found[number] = held and 1 or 0
end
return found
