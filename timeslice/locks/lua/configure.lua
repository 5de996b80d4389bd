--[[
Creates a group or changes its settings. Values were checked by the caller.
ARGV  1 floor  2 mode to declare ('lock' | 'served' | '')  3 only if the group is new: id of this request, else ''
      then pairs: field value
Reply ok mode | exists mode | mode <mode of the group>
Events GroupConfigured
--]]
-- @include group waiters
local mode, request = ARGV[2], ARGV[3]

begin()
if request ~= '' and S.mode ~= '' then
  return { has_ended(request) and 'ok' or 'exists', S.mode }
end
if mode ~= '' and S.mode ~= '' and S.mode ~= mode then
  return { 'mode', S.mode }
end
settle_clock()
if mode ~= '' then
  set('mode', mode)
end
for i = 4, #ARGV, 2 do
  redis.call('HSET', config_key, ARGV[i], ARGV[i + 1])
end
if request ~= '' then
  remember_ended(request)
end
emit('GroupConfigured', 'mode', S.mode)
save()
return { 'ok', S.mode }
