-- The queue of those who wait for one lock, of whatever kind: what the steps that include this file share. It has no ARGV
-- and Returns nothing of its own. One step is always one whole file: the other, with this one in it.
--
-- KEYS, in every step: 3 the queue: tokens by time of arrival
--                      4 the waiters: token -> when it was last seen, its grace, how long its fence is remembered,
--                        how much it wants (a matter of its kind), and the channel of its bell ('-': it has none and
--                        asks again by itself)
--
-- Time is the server's, read once a step. A waiter shows that it lives by asking again every half second. One that
-- has not for a second is struck off.

local PRESENCE_US = 1000000

local function strike_off(token)
  redis.call('ZREM', KEYS[3], token)
  redis.call('HDEL', KEYS[4], token)
end

local function is_present(entry)
  local seen = string.match(entry or '', '^%d+ ')
  return seen and math.abs(now - seen) <= PRESENCE_US
end

-- Who is next and alive, and its entry; those in front of it who are not are struck off. ``token`` is who stands in front,
-- if the caller has seen that already.
local function head(token)
  while true do
    token = token or redis.call('ZRANGE', KEYS[3], 0, 0)[1]
    if not token then
      return nil
    end
    local entry = redis.call('HGET', KEYS[4], token)
    if is_present(entry) then
      return token, entry
    end
    strike_off(token)
    token = nil
  end
end

local function ring(channel, token, fence, ms)
  if channel ~= '-' then
    redis.pcall('PUBLISH', channel, token .. ' ' .. fence .. ' ' .. now_us .. ' ' .. ms)
  end
end

-- Whether a bell on that channel would be heard, as far as this server can tell.
local function is_heard(channel)
  local heard = channel == '-' or redis.pcall('PUBSUB', 'NUMSUB', channel)
  return type(heard) ~= 'table' or heard.err or heard[2] > 0
end
