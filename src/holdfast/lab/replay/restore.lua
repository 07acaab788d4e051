-- Restore one key as it was, for a failover that has lost later writes.
--
-- KEYS 1 the key
-- ARGV 1 when it expires, in ms since 1970 (0: never)   2 its dump, in hex, because arguments are sent as text
--
-- One step, because the dump is not text before it is decoded here.

local dump = ARGV[2]:gsub('..', function(pair) return string.char(tonumber(pair, 16)) end)
return redis.call('RESTORE', KEYS[1], ARGV[1], dump, 'ABSTTL')
