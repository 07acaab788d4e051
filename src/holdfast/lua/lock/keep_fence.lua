-- Let the record of our fences last, so that inspectors see the fence and the start of a long hold.
--
-- KEYS 1 the last fences given out for this name
-- ARGV 1 the end of the token   2 retention in ms
--
-- Returns 1 it lasts that long, 0 it is gone or belongs to another token.
--
-- One step, because between the read and the write the key can get the fences of another holder, whose retention must
-- not change.

local fences = redis.pcall('GET', KEYS[1])
if type(fences) ~= 'string' or string.sub(fences, -8) ~= ARGV[1] then
  return 0
end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 1
